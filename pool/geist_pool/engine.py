"""The engine in Python, and the only importer of its binding: Engine, Gguf, Model, Session, Image.

Objects close in the reverse order of their making (`with`, or `close`); what is still in use refuses to close. Buffers go in and
out without copies: anything with the buffer protocol. `Session.attach` borrows its buffers until the session is reset, restored,
attached anew or closed, and so does every fork of it; a mapping cannot be closed before.

All calls on an engine and on what was made from it come from one thread at a time; the interpreter lock is free meanwhile.

numpy is imported by the calls that return arrays. The broker and the process that packs read model files only, and a tenth of a
second each is much of what a pool's start takes.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from msgspec import Struct

from geist_pool._geist import ffi, lib
from geist_pool.errors import (
    BadRequest,
    EngineError,
    GeistPoolError,
    ImageDamaged,
    ImageMismatch,
    ModelError,
    NonFinite,
    TooLong,
    Unsupported,
)
from geist_pool.protocol import Geometry, Sampling
from geist_pool.store.packed import FileMapping, Identity, PackedCache
from geist_pool.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Buffer

    Tokens = Sequence[int] | npt.NDArray[Any]

NUMERICS: Final[int] = lib.GEIST_NUMERICS
IMAGE_FORMAT: Final[int] = lib.GEIST_IMAGE_FORMAT
PACKED_LAYOUT: Final[int] = lib.GEIST_PACKED_LAYOUT
KV_BLOCK: Final[int] = lib.GEIST_KV_BLOCK
PAGE: Final[int] = lib.GEIST_IMAGE_PAGE

TIERS: Final[dict[str, int]] = {
    "auto": lib.GEIST_TIER_AUTO,
    "scalar": lib.GEIST_TIER_SCALAR,
    "avx2": lib.GEIST_TIER_AVX2,
    "avx512": lib.GEIST_TIER_AVX512,
}
KV_TYPES: Final[dict[str, int]] = {"f16": lib.GEIST_KV_F16, "f32": lib.GEIST_KV_F32}

_BETWEEN: Final = 0xFF  # put between strings that are joined
_PLACE_EVERY: Final = 256  # tokens between two whose places in the file are kept

_log = logging.getLogger("geist_pool.engine")

_ERRORS: Final[dict[int, type[GeistPoolError]]] = {
    lib.GEIST_E_ARGUMENT: EngineError,
    lib.GEIST_E_MEMORY: EngineError,
    lib.GEIST_E_IO: ModelError,
    lib.GEIST_E_FORMAT: ModelError,
    lib.GEIST_E_UNSUPPORTED: Unsupported,
    lib.GEIST_E_TOKEN: BadRequest,
    lib.GEIST_E_TOO_LONG: TooLong,
    lib.GEIST_E_IMAGE: ImageDamaged,
    lib.GEIST_E_MISMATCH: ImageMismatch,
    lib.GEIST_E_NONFINITE: NonFinite,
    lib.GEIST_E_STATE: EngineError,
    lib.GEIST_E_BUFFER: EngineError,
}


def _check(status: int, words: Callable[[], Any] | None = None, data: dict[str, int] | None = None) -> None:
    """The one place where a status becomes an exception; `words` fetches the engine's message."""
    if status == lib.GEIST_OK:
        return
    kind = _text(lib.geist_status_text(status))
    message = _text(words()) if words is not None else ""
    error = _ERRORS.get(status, EngineError)(message or kind, status=kind)
    error.data.update(data or {})
    raise error


def _text(pointer: Any) -> str:
    return bytes(ffi.string(pointer)).decode("utf-8", "replace") if pointer != ffi.NULL else ""


def _ids(tokens: Tokens) -> npt.NDArray[np.int32]:
    """Token ids as the engine takes them; int32 arrays are not copied. BadRequest for anything that is no list of int32."""
    import numpy as np

    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadRequest("token ids are a flat list of integers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 0x7FFFFFFF:
        raise BadRequest(f"token id {low if low < 0 else high} is outside every vocabulary")
    return np.ascontiguousarray(array, np.int32)


def available_tiers() -> tuple[str, ...]:
    """Names of the instruction-set tiers that this machine can run, slowest first."""
    return tuple(name for name, number in TIERS.items() if name != "auto" and lib.geist_tier_available(number))


class _Handle:
    """Owns one object of the engine. Its parent outlives it and counts it."""

    def __init__(self, pointer: Any, destroy: Any, parent: _Handle | None, what: str) -> None:
        # The destructor holds the parent, so that even what nobody closed is destroyed in the right order.
        self._pointer = ffi.gc(pointer, lambda p, _parent=parent: destroy(p))
        self._parent = parent
        self._what = what
        self._children = 0
        if parent is not None:
            parent._children += 1

    @property
    def _h(self) -> Any:
        if self._pointer is None:
            raise EngineError(f"the {self._what} is closed")
        return self._pointer

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._pointer is None

    def close(self) -> None:
        """Destroys it. Allowed twice. Raises EngineError while something made from it is open."""
        if self._pointer is None:
            return
        if self._children:
            raise EngineError(f"the {self._what} is still used by {self._children} other object(s)")
        pointer, self._pointer = self._pointer, None
        ffi.release(pointer)
        if self._parent is not None:
            self._parent._children -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Engine(_Handle):
    """Instruction-set tier, threads and scratch memory.

    `tier` is "auto", "scalar", "avx2" or "avx512", `threads` (1 to 256) share a pass. Raises Unsupported if this machine lacks
    the tier, EngineError for another count.
    """

    def __init__(self, tier: str = "auto", threads: int = 1) -> None:
        if tier not in TIERS:
            raise Unsupported(f"there is no tier {tier!r}; there are {', '.join(TIERS)}")
        if not 1 <= threads <= 256:
            raise EngineError(f"{threads} threads; 1 to 256 are possible")
        options = ffi.new("struct geist_engine_options *", {"tier": TIERS[tier], "n_threads": threads})
        out = ffi.new("struct geist_engine **")
        status = lib.geist_engine_create(options, out)
        if status == lib.GEIST_E_UNSUPPORTED:
            raise Unsupported(f"this machine cannot run the tier {tier}; it can run {', '.join(available_tiers())}")
        _check(status)
        super().__init__(out[0], lib.geist_engine_destroy, None, "engine")
        self.threads = threads

    @property
    def tier(self) -> str:
        """The tier that runs, never "auto"."""
        return _text(lib.geist_tier_name(lib.geist_engine_tier(self._h)))

    def _words(self) -> Any:
        return lib.geist_engine_error(self._h)


class TensorInfo(Struct, frozen=True):
    """A tensor as its file describes it; dims[0] is the row length."""

    name: str
    type: str
    dims: tuple[int, ...]
    data_bytes: int


Scalar = int | float | bool | str
Value = Scalar | list[int] | list[float] | list[bool] | list[bytes]

_SCALARS: Final[dict[int, str]] = {
    lib.GEIST_U8: "B",
    lib.GEIST_I8: "b",
    lib.GEIST_U16: "H",
    lib.GEIST_I16: "h",
    lib.GEIST_U32: "I",
    lib.GEIST_I32: "i",
    lib.GEIST_F32: "f",
    lib.GEIST_BOOL: "?",
    lib.GEIST_U64: "Q",
    lib.GEIST_I64: "q",
    lib.GEIST_F64: "d",
}


class Gguf(_Handle):
    """A parsed GGUF file: metadata and tensor table. Raises ModelError with the place in the file, or Unsupported."""

    def __init__(self, engine: Engine, path: str | Path) -> None:
        self.path = Path(path)
        self.engine = engine
        out = ffi.new("struct geist_gguf **")
        _check(lib.geist_gguf_open(engine._h, str(path).encode(), out), engine._words)
        super().__init__(out[0], lib.geist_gguf_close, engine, "model file")

    def keys(self) -> list[str]:
        """All metadata keys, in the file's order."""
        key, value = ffi.new("const char **"), ffi.new("struct geist_value *")
        out: list[str] = []
        for i in range(lib.geist_gguf_n_values(self._h)):
            lib.geist_gguf_value_at(self._h, i, key, value)
            out.append(_text(key[0]))
        return out

    def get(self, key: str) -> Value | None:
        """A metadata value, or None. Numbers, booleans and text as such; arrays as lists, their strings as bytes.

        Raises ModelError for text that is no UTF-8, Unsupported for an array of arrays.
        """
        value = self._value(key)
        if value is None:
            return None
        data = memoryview(ffi.buffer(value.data, value.data_bytes))
        if value.type == lib.GEIST_STRING:
            try:
                return str(data, "utf-8")
            except UnicodeDecodeError as error:
                raise ModelError(f"the text of {key} is no UTF-8 at byte {error.start}", path=key) from error
        if value.type != lib.GEIST_ARRAY:
            scalar: Scalar = struct.unpack_from("<" + _SCALARS[value.type], data)[0]
            return scalar
        if value.item_type == lib.GEIST_STRING:
            return _strings(value)
        if value.item_type == lib.GEIST_ARRAY:
            raise Unsupported(f"{key} is an array of arrays", path=key)
        items: list[Any] = list(struct.unpack_from(f"<{value.count}{_SCALARS[value.item_type]}", data))
        return items

    def tensors(self) -> list[TensorInfo]:
        """The tensor table, in the file's order."""
        info = ffi.new("struct geist_tensor_info *")
        out: list[TensorInfo] = []
        for i in range(lib.geist_gguf_n_tensors(self._h)):
            lib.geist_gguf_tensor_at(self._h, i, info)
            dims = tuple(info.dims[d] for d in range(info.n_dims))
            out.append(TensorInfo(_text(info.name), _text(info.type), dims, info.data_bytes))
        return out

    def fingerprint(self) -> str:
        """Hash over metadata, tensor table and every tensor, taken from the file's bytes now; 64 hexadecimal digits."""
        out = ffi.new("uint8_t[32]")
        _check(lib.geist_gguf_fingerprint(self._h, out), self.engine._words)
        return bytes(ffi.buffer(out)).hex()

    def _value(self, key: str) -> Any:
        value = ffi.new("struct geist_value *")
        return value if lib.geist_gguf_value(self._h, key.encode(), value) else None

    def _array(self, key: str) -> Any:
        """An array as it lies in the file; ModelError if there is none. Valid while the file is open."""
        value = self._value(key)
        if value is None or value.type != lib.GEIST_ARRAY:
            raise ModelError(f"{key} is {'missing' if value is None else 'no array'}", path=key)
        return value


def _strings(array: Any) -> list[bytes]:
    """The strings of an array, split in one go where none holds the byte put between them (in UTF-8 none does)."""
    out = bytearray(array.data_bytes - 7 * array.count)
    with ffi.from_buffer("uint8_t[]", out, require_writable=True) as data:
        lib.geist_value_join(array, _BETWEEN, data)
    found = bytes(out).split(bytes((_BETWEEN,)))[:-1]  # the last one has a mark behind it as well
    if len(found) == array.count:
        return found
    found, at = [], 0
    raw = memoryview(ffi.buffer(array.data, array.data_bytes))
    for _ in range(array.count):
        begin, at = at + 8, lib.geist_value_skip(array, at, 1)
        found.append(bytes(raw[begin:at]))
    return found


class ModelInfo(Struct, frozen=True):
    """Shape and sizes of a model; *_bytes are bytes, the rest counts."""

    architecture: str
    n_layers: int
    n_recurrent_layers: int
    n_attention_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    n_params: int
    file_bytes: int
    packed_bytes: int
    recurrent_bytes: int
    kv_bytes_per_token: int


class Model(_Handle):
    """Weights bound to a forward pass, from a GGUF and its packed weights in `cache_dir`/packed.

    The packed weights are made there first where they are missing or damaged; the file's fingerprint is believed while its
    device, inode, size and modification time are unchanged, and taken again with `verify`. With `check` the packed weights are
    compared with their checksum (a read of all of them), and made anew where they do not agree. Raises ModelError, Unsupported,
    or EngineError where the packed weights find no room.
    """

    _weights: Any = None  # the packed weights' memory, borrowed by the engine

    def __init__(
        self, engine: Engine, path: str | Path, *, cache_dir: str | Path, verify: bool = False, check: bool = False
    ) -> None:
        self._check_weights = check
        self.engine = engine
        self.path = Path(path)
        identity = Identity.of(self.path)
        self.gguf = Gguf(engine, path)
        try:
            self._create()
            try:
                self.info = self._read_info()
                self._packed = self._load(PackedCache(Path(cache_dir) / "packed"), identity, verify)
            except BaseException:
                super().close()
                raise
        except BaseException:
            self.gguf.close()
            raise
        self._places: list[int] = []
        self._bytes: dict[int, bytes] = {}

    def close(self) -> None:
        """Destroys the model, unmaps its weights and closes its file. Raises EngineError while sessions are open."""
        if self.closed:
            return
        super().close()
        self._weights = None
        self._packed.close()
        self.gguf.close()

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that stand for metadata, tensor table and every tensor."""
        out = ffi.new("uint8_t[32]")
        _check(lib.geist_model_fingerprint(self._h, out), self.engine._words)
        return bytes(ffi.buffer(out)).hex()

    def geometry(self, kv_type: str = "f16") -> Geometry:
        """What the size of an image follows from."""
        out = ffi.new("struct geist_image_geometry *")
        lib.geist_model_image_geometry(self._h, KV_TYPES[kv_type], out)
        return Geometry(**{f: getattr(out, f) for f in Geometry.__struct_fields__})

    def vocabulary(self) -> Vocabulary:
        """Everything that text needs to know, read from the file."""
        return Vocabulary.from_metadata(self.gguf.get)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to an answer: none for a control token, whose name was never said; the text of a
        user-defined one."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._spell(token)
        return found

    def _spell(self, token: int) -> bytes:
        tokens, types = self.gguf._array("tokenizer.ggml.tokens"), self.gguf._array("tokenizer.ggml.token_type")
        if not self._places:
            # Of every so many tokens: a place of each of 248,320 would be ten megabytes in every worker.
            self._places = [0]
            while len(self._places) <= self.info.n_vocab // _PLACE_EVERY:
                self._places.append(lib.geist_value_skip(tokens, self._places[-1], _PLACE_EVERY))
        at = lib.geist_value_skip(tokens, self._places[token // _PLACE_EVERY], token % _PLACE_EVERY)
        text = ffi.buffer(tokens.data, tokens.data_bytes)[at + 8 : lib.geist_value_skip(tokens, at, 1)]
        (kind,) = struct.unpack_from("<I", ffi.buffer(types.data, types.data_bytes), 4 * token)
        # The vocabulary's own rule, asked about one token: a worker does not keep all of them as text.
        model = "llama" if self.gguf.get("tokenizer.ggml.model") in ("llama", b"llama") else "gpt2"
        one = Vocabulary(model=model, pre="", tokens=(text.decode(),), types=(kind,), merges=())
        return b"" if one.is_control(0) else one.piece(0)

    def _create(self) -> None:
        out = ffi.new("struct geist_model **")
        _check(lib.geist_model_create(self.gguf._h, out), self.engine._words)
        super().__init__(out[0], lib.geist_model_destroy, self.gguf, "model")

    def _read_info(self) -> ModelInfo:
        return _model_info(self._h)

    def _load(self, cache: PackedCache, identity: Identity, verify: bool) -> FileMapping:
        """Finds or makes the packed weights, and binds them."""
        known = None if verify else cache.known(identity)
        if known is not None and (mapping := self._bind_kept(cache, known)) is not None:
            return mapping
        with cache.lock():
            known = None if verify else cache.known(identity)  # another process may have packed meanwhile
            if known is None and cache.any_of_size(self.info.packed_bytes, PACKED_LAYOUT, NUMERICS):
                known = self.gguf.fingerprint()
            mapping = self._bind_kept(cache, known) if known is not None else None
            mapping = mapping or self._pack(cache)
            if Identity.of(self.path) != identity:
                raise ModelError(f"{self.path} was changed while it was loaded")
            cache.remember(identity, self.fingerprint)
        return mapping

    def _bind_kept(self, cache: PackedCache, fingerprint: str) -> FileMapping | None:
        """Binds an existing file; None where there is none or it will not do, with the reason logged."""
        path = cache.path(fingerprint, PACKED_LAYOUT, NUMERICS)
        try:
            mapping = FileMapping(path)
        except FileNotFoundError:
            return None
        except ImageDamaged as error:
            _log.warning("packed weights %s are made anew: %s", path.name, error)
            return None
        try:
            mapping.populate()
            self._bind(mapping)
            if self.fingerprint != fingerprint:
                self._unbind()
                raise ImageMismatch("it holds the weights of another model")
            if self._check_weights:
                self._verify_weights()
        except (ImageDamaged, ImageMismatch) as error:
            _log.warning("packed weights %s are made anew: %s", path.name, error)
            mapping.close()
            return None
        return mapping

    def _bind(self, mapping: FileMapping) -> None:
        data = ffi.from_buffer(mapping.view)
        try:
            _check(lib.geist_model_bind(self._h, data, len(data)), self.engine._words)
        except GeistPoolError:
            ffi.release(data)
            raise
        self._weights = data  # keeps the mapping from being closed

    def _unbind(self) -> None:
        """A model is bound once: this one is made again."""
        super().close()
        self._create()
        ffi.release(self._weights)
        self._weights = None

    def _verify_weights(self) -> None:
        try:
            _check(lib.geist_model_verify(self._h), self.engine._words)
        except ImageDamaged:
            self._unbind()
            raise

    def _pack(self, cache: PackedCache) -> FileMapping:
        """Writes the packed weights, binds them, and only then gives the file its name."""
        n = lib.geist_model_packed_size(self._h)
        _log.info("packing %s: %d bytes", self.path.name, n)
        with cache.draft(n) as draft:
            with ffi.from_buffer(draft.view, require_writable=True) as data:
                _check(lib.geist_model_pack(self._h, data, n), self.engine._words)
            mapping = FileMapping(draft.path)
            self._bind(mapping)
            draft.publish(cache.path(self.fingerprint, PACKED_LAYOUT, NUMERICS))
        return mapping


def model_info(gguf: Gguf) -> ModelInfo:
    """Shape and sizes of the model in a file, without packing its weights. Raises ModelError or Unsupported where it is none that
    this engine can run."""
    out = ffi.new("struct geist_model **")
    _check(lib.geist_model_create(gguf._h, out), gguf.engine._words)
    pointer = ffi.gc(out[0], lib.geist_model_destroy)
    try:
        return _model_info(pointer)
    finally:
        ffi.release(pointer)


def _model_info(pointer: Any) -> ModelInfo:
    info = ffi.new("struct geist_model_info *")
    lib.geist_model_get_info(pointer, info)
    values = {f: getattr(info, f) for f in ModelInfo.__struct_fields__ if f != "architecture"}
    return ModelInfo(architecture=_text(info.architecture), **values)


class Session(_Handle):
    """One timeline of tokens and its state. `n_ctx` is the most positions, 0 means what the model was trained for."""

    def __init__(self, model: Model, *, kv_type: str = "f16", n_ctx: int = 0) -> None:
        if kv_type not in KV_TYPES:
            raise Unsupported(f"there is no KV type {kv_type!r}; there are {', '.join(KV_TYPES)}")
        options = ffi.new("struct geist_session_options *", {"kv_type": KV_TYPES[kv_type], "n_ctx": n_ctx})
        out = ffi.new("struct geist_session **")
        _check(lib.geist_session_create(model._h, options, out), model.engine._words)
        self._own(out[0], model, kv_type, n_ctx or model.info.n_ctx_train, ())

    def _own(self, pointer: Any, model: Model, kv_type: str, n_ctx: int, borrowed: tuple[Any, ...]) -> None:
        super().__init__(pointer, lib.geist_session_destroy, model, "session")
        self.model = model
        self.kv_type = kv_type
        self.n_ctx = n_ctx
        self._borrowed = borrowed  # buffers of the image that the state still points into

    def close(self) -> None:
        """Destroys it and lets go of what it borrowed. Allowed twice."""
        super().close()
        self._borrowed = ()

    def reset(self) -> None:
        """Back to position 0, as if new."""
        lib.geist_session_reset(self._h)
        self._borrowed = ()

    @property
    def position(self) -> int:
        """Tokens taken in so far."""
        return int(lib.geist_session_position(self._h))

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The ids from position 0 on: int32[position], a copy."""
        import numpy as np

        n = self.position
        if n == 0:
            return np.empty(0, np.int32)
        return np.frombuffer(ffi.buffer(lib.geist_session_tokens(self._h), 4 * n), np.int32).copy()

    def prefill(self, tokens: Tokens) -> None:
        """Takes in at least one token. BadRequest for an id outside the vocabulary, TooLong past n_ctx; nothing moved then."""
        ids = _ids(tokens)
        with ffi.from_buffer("int32_t[]", ids) as data:
            status = lib.geist_session_prefill(self._h, data, len(ids))
        self._check(status, len(ids))

    def decode(self, token: int) -> None:
        """Takes in one token."""
        self.prefill((token,))

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits after the last token: float32[n_vocab], a copy. EngineError at position 0."""
        import numpy as np

        out = ffi.new("const float **")
        self._check(lib.geist_session_logits(self._h, out))
        return np.frombuffer(ffi.buffer(out[0], 4 * self.model.info.n_vocab), np.float32).copy()

    def logprobs(self, ids: Tokens) -> npt.NDArray[np.float32]:
        """Log-probabilities of `ids` as the next token, over the whole vocabulary: float32[len(ids)], each <= 0."""
        import numpy as np

        array = _ids(ids)
        out = np.empty(len(array), np.float32)
        with ffi.from_buffer("int32_t[]", array) as data, ffi.from_buffer("float[]", out) as result:
            status = lib.geist_session_logprobs(self._h, data, len(array), result)
        self._check(status)
        return out

    def top(self, k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Ids and log-probabilities of the k likeliest next tokens, likeliest first, ties to the lower id."""
        import numpy as np

        ids, values = np.empty(k, np.int32), np.empty(k, np.float32)
        with ffi.from_buffer("int32_t[]", ids) as id_data, ffi.from_buffer("float[]", values) as value_data:
            status = lib.geist_session_top(self._h, k, id_data, value_data)
        self._check(status)
        return ids, values

    def score(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        """Log-probability of each token as a continuation, given those before it: float32[len(tokens)]. Nothing moves."""
        import numpy as np

        ids = _ids(tokens)
        out = np.empty(len(ids), np.float32)
        with ffi.from_buffer("int32_t[]", ids) as data, ffi.from_buffer("float[]", out) as result:
            status = lib.geist_session_score(self._h, data, len(ids), result)
        self._check(status, len(ids))
        return out

    def set_sampler(self, sampling: Sampling) -> None:
        """How `sample` draws; without a seed in `sampling` the seed is 0. EngineError names a value out of range."""
        fields = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n")
        params = ffi.new("struct geist_sampler_params *", {f: getattr(sampling, f) for f in fields})
        self._check(lib.geist_session_set_sampler(self._h, params, sampling.seed or 0, sampling.stream))

    def sample(self) -> int:
        """Draws the next token from the pending logits; does not take it in."""
        out = ffi.new("int32_t *")
        self._check(lib.geist_session_sample(self._h, out))
        return int(out[0])

    # ---- the session as bytes

    @property
    def snapshot_size(self) -> int:
        """Bytes of a flat image."""
        return int(lib.geist_session_snapshot_size(self._h))

    @property
    def snapshot_thin_size(self) -> int:
        """Bytes of a thin image: without the whole KV blocks."""
        return int(lib.geist_session_snapshot_thin_size(self._h))

    def snapshot(self, out: Buffer | None = None) -> bytearray:
        """The flat image: into `out` (at least `snapshot_size` bytes; the result is empty then), or as a new bytearray."""
        result = bytearray(self.snapshot_size) if out is None else bytearray()
        self._write(lib.geist_session_snapshot, result if out is None else out)
        return result

    def snapshot_thin(self, out: Buffer) -> None:
        """The thin image into `out`, at least `snapshot_thin_size` bytes."""
        self._write(lib.geist_session_snapshot_thin, out)

    def snapshot_blocks(self, first_block: int, n_blocks: int, out: Buffer) -> None:
        """Whole KV blocks [first_block, first_block + n_blocks) into `out`, kv_block_bytes each."""
        self._write(lambda s, data, n: lib.geist_session_snapshot_blocks(s, first_block, n_blocks, data, n), out)

    def restore(self, image: Buffer) -> None:
        """Becomes the flat image. ImageDamaged, ImageMismatch or TooLong leave the session byte for byte as it was."""
        with ffi.from_buffer(image) as data:
            status = lib.geist_session_restore(self._h, data, len(data))
        self._check(status)
        self._borrowed = ()

    def attach(self, image: Buffer, kv: Sequence[Buffer] = ()) -> None:
        """Becomes the image without copying it: flat without `kv`, else thin over these areas of whole blocks from position 0.

        All buffers are page-aligned and stay borrowed. On an error the session is as it was and borrows nothing new.
        """
        data = ffi.from_buffer(image)
        areas = [ffi.from_buffer(area) for area in kv]
        table = ffi.new("struct geist_bytes[]", [{"data": area, "n": len(area)} for area in areas])
        self._check(lib.geist_session_attach(self._h, data, len(data), table if areas else ffi.NULL, len(areas)))
        self._borrowed = (data, *areas)

    def fork(self) -> Session:
        """A second session at the same point; this one does not move by it."""
        out = ffi.new("struct geist_session **")
        self._check(lib.geist_session_fork(self._h, out))
        fork = Session.__new__(Session)
        fork._own(out[0], self.model, self.kv_type, self.n_ctx, self._borrowed)
        return fork

    def _write(self, call: Callable[[Any, Any, int], int], out: Buffer) -> None:
        with ffi.from_buffer(out, require_writable=True) as data:
            status = call(self._h, data, len(data))
        self._check(status)

    def _check(self, status: int, n: int = 0) -> None:
        if status == lib.GEIST_E_TOO_LONG and n:
            _check(status, self._words, {"tokens": self.position + n, "limit": self.n_ctx})
        _check(status, self._words)

    def _words(self) -> Any:
        return lib.geist_session_error(self._h)


class ImageInfo(Struct, frozen=True):
    """An image's header. `tokens` is int32[n_tokens], a copy."""

    format: int
    numerics: int
    flat: bool
    kv_type: str
    fingerprint: str
    id: int
    parent_id: int
    n_kept: int
    n_tokens: int
    image_bytes: int
    tokens: npt.NDArray[np.int32]


class Image:
    """Images as bytes; no model is needed."""

    @staticmethod
    def inspect(image: Buffer) -> ImageInfo:
        """Reads the header; ImageDamaged if it or the sizes are wrong, ImageMismatch for another format or byte order."""
        import numpy as np

        out = ffi.new("struct geist_image_info *")
        with ffi.from_buffer(image) as data:
            _check(lib.geist_image_inspect(data, len(data), out))
            n = out.n_tokens
            tokens = np.frombuffer(ffi.buffer(out.tokens, 4 * n), np.int32).copy() if n else np.empty(0, np.int32)
        kv_type = next((name for name, number in KV_TYPES.items() if number == out.kv_type), None)
        if kv_type is None:
            raise ImageDamaged(f"the image has the unknown KV type {int(out.kv_type)}")
        return ImageInfo(
            format=out.format,
            numerics=out.numerics,
            flat=bool(out.flat),
            kv_type=kv_type,
            fingerprint=bytes(ffi.buffer(out.fingerprint)).hex(),
            id=out.id,
            parent_id=out.parent_id,
            n_kept=out.n_kept,
            n_tokens=n,
            image_bytes=out.image_bytes,
            tokens=tokens,
        )

    @staticmethod
    def verify(image: Buffer, kv: Sequence[Buffer] = (), first_block: int = 0) -> None:
        """Checks every checksum, of the blocks those from `first_block` on. Raises ImageDamaged."""
        data = ffi.from_buffer(image)
        areas = [ffi.from_buffer(area) for area in kv]
        table = ffi.new("struct geist_bytes[]", [{"data": area, "n": len(area)} for area in areas])
        status = lib.geist_image_verify(data, len(data), table if areas else ffi.NULL, len(areas), first_block)
        for borrowed in (data, *areas):
            ffi.release(borrowed)
        _check(status)

    @staticmethod
    def check(image: Buffer, kv: Sequence[Buffer], first_block: int, *, fingerprint: str, kv_type: str) -> npt.NDArray[np.int32]:
        """Verifies a thin image of this model and KV type, and gives its token ids: int32[n_tokens]."""
        info = Image.inspect(image)
        if info.fingerprint != fingerprint:
            raise ImageMismatch("the image was made from another model")
        if info.numerics != NUMERICS or info.kv_type != kv_type or info.flat:
            raise ImageMismatch(
                f"the image is {'flat' if info.flat else 'thin'}, {info.kv_type}, numerics {info.numerics}; "
                f"thin, {kv_type}, {NUMERICS} is needed"
            )
        Image.verify(image, kv, first_block)
        return info.tokens

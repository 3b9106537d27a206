"""Models of a real one's geometry with random weights: for speed, size and loading, where only tensors' sizes and types matter.

    python -m bench.shapes --list
    python -m bench.shapes qwen35-0.8b-q8_0 [--cache-dir DIR]

A name is SHAPE-TYPE, and every bench takes one for `--model`. A file follows from its name and from this module alone (and, for
the vocabulary, from the demo's words): the seed is fixed. It is made once and kept under CACHE/shapes.

Quantised blocks are drawn as bytes in their own format, not quantised from numbers: a uniform quant times a scale of random sign
has the mean 0 and the spread that a layer needs. So logits are finite and differ from token to token, and what such a model says
means nothing. All matrices have the one type of the name, where a published file may mix types.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

RECIPE: Final = 1  # raised with any change that moves a byte
SEED: Final = 20261204
ALIGNMENT: Final = 32
CHUNK_BYTES: Final = 8 << 20  # drawn at a time
EPSILON: Final = 1e-6

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


# ---- weight types


@dataclass(frozen=True)
class Format:
    """A GGML type: `width` weights in `size` bytes. An f16 scale lies at `scale_at`; a type with a minimum has that at `min_at`,
    and `centre` is what to subtract (in scales) so that the mean is 0. spread: standard deviation of a weight of scale 1."""

    code: int
    file_code: int  # general.file_type of a file that is mostly of this type
    width: int
    size: int
    scale_at: int = 0
    min_at: int | None = None
    centre: float = 0.0
    spread: float = 1.0


# A uniform integer of n values has the variance (n*n - 1) / 12. The K types' 6-bit (Q6_K: 8-bit) block scales are uniform as
# well; theirs is the variance of scale * (quant - centre) + centre * (scale - minimum).
FORMATS: Final[dict[str, Format]] = {
    "f32": Format(0, 0, 1, 4),
    "f16": Format(1, 1, 1, 2),
    "q4_0": Format(2, 2, 32, 18, spread=4.64),
    "q4_1": Format(3, 3, 32, 20, min_at=2, centre=-7.5, spread=4.61),
    "q5_0": Format(6, 8, 32, 22, spread=9.25),
    "q5_1": Format(7, 9, 32, 24, min_at=2, centre=-15.5, spread=9.23),
    "q8_0": Format(8, 7, 32, 34, spread=73.6),
    "q4_k": Format(12, 14, 256, 144, min_at=2, centre=7.5, spread=258),
    "q5_k": Format(13, 16, 256, 176, min_at=2, centre=15.5, spread=527),
    "q6_k": Format(14, 18, 256, 210, scale_at=208, spread=1366),
}


def draw(rng: np.random.Generator, kind: str, n_weights: int, deviation: float) -> bytes:
    """Random weights of mean 0 and about this standard deviation, in the bytes of their type."""
    f = FORMATS[kind]
    if f.width == 1:
        values = rng.standard_normal(n_weights, np.float32) * np.float32(deviation)
        return values.astype("<f4" if kind == "f32" else "<f2").tobytes()
    n = n_weights // f.width
    blocks: Bytes = np.frombuffer(bytearray(rng.bytes(n * f.size)), np.uint8).reshape(n, f.size)
    if kind == "q8_0":  # a quantiser gives -127 to 127, and engines may count on it
        quants = blocks[:, 2:].view(np.int8)
        np.maximum(quants, -127, out=quants)
    scales = (rng.uniform(0.75, 1.25, n) * rng.choice([-1.0, 1.0], n) * (deviation / f.spread)).astype("<f2")
    blocks[:, f.scale_at : f.scale_at + 2] = scales.view(np.uint8).reshape(n, 2)
    if f.min_at is not None:
        minima = (scales.astype(np.float32) * f.centre).astype("<f2")
        blocks[:, f.min_at : f.min_at + 2] = minima.view(np.uint8).reshape(n, 2)
    return blocks.tobytes()


# ---- shapes


@dataclass(frozen=True)
class Shape:
    """A geometry. The linear_* and full_every are those of the gated delta rule's layers (qwen35)."""

    arch: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float
    tied: bool = True
    rotated: float = 1.0  # part of a head that is rotated
    linear_heads: int = 0
    linear_dim: int = 0
    conv: int = 4
    full_every: int = 4
    about: str = ""


def _qwen35(layers: int, hidden: int, ffn: int, heads: int, linear_heads: int, about: str, **changes: Any) -> Shape:
    """As Qwen3.5 has it: a KV head for every four heads of 256, a quarter of which is rotated, linear heads of 128."""
    fields: dict[str, Any] = {
        "kv_heads": max(heads // 4, 1), "head_dim": 256, "vocab": 248320, "context": 262144, "rope_base": 1e7, "rotated": 0.25,
        "linear_dim": 128,
    }  # fmt: skip
    given = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "linear_heads": linear_heads, "about": about}
    return Shape("qwen35", **(fields | given | changes))


SHAPES: Final[dict[str, Shape]] = {
    "qwen35-0.8b": _qwen35(24, 1024, 3584, 8, 16, "Qwen3.5-0.8B, exactly"),
    "qwen35-0.5b": _qwen35(12, 1024, 3584, 8, 16, "half of its layers"),
    "qwen35-0.3b": _qwen35(12, 768, 2304, 4, 8, "narrower, of half as many layers"),
    "qwen35-0.1b": _qwen35(8, 512, 1536, 4, 8, "smaller still, with a vocabulary of 64,000", vocab=64000),
    "qwen35-1.9b": _qwen35(24, 2048, 6144, 8, 16, "twice as wide"),
    "qwen35-tiny": _qwen35(
        4, 256, 512, 4, 4, "for tests", kv_heads=2, head_dim=64, linear_dim=64, vocab=2048, context=4096
    ),
    "llama-135m": Shape("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, about="SmolLM2-135M"),
    "llama-360m": Shape("llama", 32, 960, 2560, 15, 5, 64, 49152, 8192, 1e5, about="SmolLM2-360M"),
    "llama-1.2b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, about="Llama 3.2 1B"),
    "llama-tiny": Shape("llama", 2, 256, 512, 4, 2, 64, 2048, 4096, 1e4, tied=False, about="for tests"),
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """dims: row length first, as in the file. deviation: of a matrix' weights; `kind` says how others are drawn."""

    name: str
    dims: tuple[int, ...]
    kind: str = "matrix"
    deviation: float = 0.0

    @property
    def weights(self) -> int:
        return math.prod(self.dims)


def tensors(s: Shape) -> Iterator[Tensor]:
    """Every tensor, in file order.

    Rows of unit spread keep vectors as large as they were. What a layer adds to the residual stream is kept small, as training
    does: else the first layers' rounding would be all that the last one sees.
    """

    def matrix(name: str, rows: int, row: int, gain: float = 1.0) -> Tensor:
        return Tensor(name, (row, rows), "matrix", gain / math.sqrt(row))

    small = 1 / math.sqrt(2 * s.layers)
    h, q, kv = s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim
    linear = s.linear_heads * s.linear_dim
    yield matrix("token_embd.weight", s.vocab, h, 2.0)
    for i in range(s.layers):
        at = f"blk.{i}."
        yield Tensor(at + "attn_norm.weight", (h,), "norm")
        if s.arch == "qwen35" and (i + 1) % s.full_every:
            yield matrix(at + "attn_qkv.weight", 3 * linear, h)
            yield matrix(at + "attn_gate.weight", linear, h)
            yield matrix(at + "ssm_alpha.weight", s.linear_heads, h)
            yield matrix(at + "ssm_beta.weight", s.linear_heads, h)
            yield Tensor(at + "ssm_a", (s.linear_heads,), "decay")
            yield Tensor(at + "ssm_dt.bias", (s.linear_heads,), "bias")
            yield Tensor(at + "ssm_conv1d.weight", (s.conv, 3 * linear), "taps")
            yield Tensor(at + "ssm_norm.weight", (s.linear_dim,), "norm")
            yield matrix(at + "ssm_out.weight", h, linear, small / 4)
        else:
            gated = 2 if s.arch == "qwen35" else 1
            yield matrix(at + "attn_q.weight", gated * q, h)
            yield matrix(at + "attn_k.weight", kv, h)
            yield matrix(at + "attn_v.weight", kv, h)
            if s.arch == "qwen35":
                yield Tensor(at + "attn_q_norm.weight", (s.head_dim,), "norm")
                yield Tensor(at + "attn_k_norm.weight", (s.head_dim,), "norm")
            yield matrix(at + "attn_output.weight", h, q, small)
        yield Tensor(at + ("post_attention_norm.weight" if s.arch == "qwen35" else "ffn_norm.weight"), (h,), "norm")
        yield matrix(at + "ffn_gate.weight", s.ffn, h)
        yield matrix(at + "ffn_up.weight", s.ffn, h)
        yield matrix(at + "ffn_down.weight", h, s.ffn, small)
    yield Tensor("output_norm.weight", (h,), "signed norm")
    if not s.tied:
        yield matrix("output.weight", s.vocab, h, 2.0)


def small_tensor(t: Tensor, rng: np.random.Generator) -> bytes:
    """A tensor that is kept as f32."""
    values = rng.normal(0.0, 1.0, t.weights)
    if t.kind in ("norm", "signed norm"):
        values = 1 + 0.1 * values
    if t.kind == "signed norm":  # where output and embedding are one matrix, the last token would be the likeliest next one
        values *= rng.choice([-1.0, 1.0], t.weights)
    elif t.kind == "decay":  # from hardly forgetting to forgetting at once
        values = -np.exp(rng.uniform(math.log(0.02), math.log(3.0), t.weights))
    elif t.kind == "taps":
        values *= 0.5
    return values.astype("<f4").tobytes()


# ---- vocabulary

SPACE: Final = "\u0120"  # how the byte alphabet writes a space
LETTERS: Final = "etaoinshrdlcumwfgypbvkjxqz"  # by how often English uses them
COMMON: Final = """the of and to in is that it was for on are as with his they be at this have from or had by not but what all
were when we there can an your which their said if do will each about how up out them then she many some so these would other
into has more her two like him see time could no make than first been its who now people my made over did down only way find
use may long little very after just where most know get through back much before go good new write our me man too any day same
right look think also around another came come work three word must because does part even place well such here take why help
put different away again off went old number great tell men say small every found still between name should home big give air
line set own under read last never us left end along while might next something seemed thought both few those always looked
show large often together asked house world going want school important until form food keep children feet land side without
once animal life enough took sometimes four head above kind began almost live page got earth need far hand high year answer
question context window ferry inn river crown tax coal barn stairs night morning door king gold road horse money letter"""
CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NORMAL_TYPE, CONTROL_TYPE = 1, 3
TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def known_words() -> list[str]:
    """Words that are one token behind a space: common ones, and those of the demo, whose length is what is measured."""
    from geist_pool.demo.world import CONTEXT_TEXT, QUESTIONS

    text = CONTEXT_TEXT + " ".join(q.suffix for q in QUESTIONS)
    return list(dict.fromkeys([*COMMON.split(), *re.findall(r"[A-Za-z]+", text)]))


def byte_alphabet() -> list[str]:
    """The character that stands for each byte: itself where it is printable, else the next one from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


class Merges:
    """Tokens of a byte-level BPE in the making, and the merges that lead to them."""

    def __init__(self, most: int) -> None:
        self.tokens = byte_alphabet()
        self.merges: list[str] = []
        self._known = set(self.tokens)
        self._most = most

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self._most

    def join(self, left: str, right: str) -> None:
        """left + right, both of which are tokens, becomes one, unless it is one already or there is no room."""
        if self.full or left + right in self._known:
            return
        self.tokens.append(left + right)
        self._known.add(left + right)
        self.merges.append(f"{left} {right}")

    def word(self, word: str) -> None:
        """Grows the word letter by letter from its beginning."""
        for end in range(1, len(word)):
            self.join(word[:end], word[end])


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """(tokens, their types, merges): known words are one token, other words about one for four letters, any bytes some."""
    made = Merges(size - len(CONTROL))
    words = known_words()
    for word in words:  # behind a space first: merges that come earlier win, and no inner pair may break one of these
        made.word(SPACE + word)
    newline = byte_alphabet()[0x0A]
    made.join(newline, newline)
    for word in words:
        made.word(word)
    pairs = sorted(itertools.product(range(len(LETTERS)), repeat=2), key=lambda p: (max(p), p))
    twos = [LETTERS[a] + LETTERS[b] for a, b in pairs]
    for two in twos:
        made.join(*two)
    for n, left in enumerate(twos):  # by how common their rarer half is
        for right in twos[:n]:
            made.join(left, right)
            made.join(right, left)
        made.join(left, left)
        if made.full:
            break
    missing = made._most - len(made.tokens)
    tokens = [*made.tokens, *(f"[unused {i}]" for i in range(missing)), *CONTROL]
    types = [NORMAL_TYPE] * (len(tokens) - len(CONTROL)) + [CONTROL_TYPE] * len(CONTROL)
    return tokens, types, made.merges


# ---- the file

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _strings(items: Sequence[str]) -> bytes:
    return struct.pack("<IIQ", ARRAY, STRING, len(items)) + b"".join(map(_string, items))


def _i32s(items: Sequence[int]) -> bytes:
    return struct.pack(f"<IIQ{len(items)}i", ARRAY, I32, len(items), *items)


def _value(value: object) -> bytes:
    """A metadata value with its type; whole numbers as u32."""
    if isinstance(value, bytes):  # made already
        return value
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", U32, value)
    if isinstance(value, float):
        return struct.pack("<If", F32, value)
    return struct.pack("<I", STRING) + _string(str(value))


def metadata(name: str, s: Shape, kind: str) -> dict[str, object]:
    """All keys of the file."""
    tokens, types, merges = vocabulary(s.vocab)
    rotated = int(s.head_dim * s.rotated)
    own: dict[str, object] = {
        "block_count": s.layers,
        "context_length": s.context,
        "embedding_length": s.hidden,
        "feed_forward_length": s.ffn,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": EPSILON,
        "rope.freq_base": s.rope_base,
        "rope.dimension_count": rotated,
    }
    if s.arch == "qwen35":
        third = -(-rotated // 6)  # three interleaved axes share the rotated pairs; text moves along all of them alike
        rest = rotated // 2 - third
        own |= {
            "rope.dimension_sections": _i32s([third, -(-rest // 2), rest // 2, 0]),
            "ssm.conv_kernel": s.conv,
            "ssm.state_size": s.linear_dim,
            "ssm.group_count": s.linear_heads,
            "ssm.time_step_rank": s.linear_heads,
            "ssm.inner_size": s.linear_heads * s.linear_dim,
            "full_attention_interval": s.full_every,
        }
    first_control = len(tokens) - len(CONTROL)
    return {
        "general.architecture": s.arch,
        "general.name": f"{name} (random weights)",
        "general.file_type": FORMATS[kind].file_code,
        "general.quantization_version": 2,
        **{f"{s.arch}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35" if s.arch == "qwen35" else "smollm",
        "tokenizer.ggml.tokens": _strings(tokens),
        "tokenizer.ggml.token_type": _i32s(types),
        "tokenizer.ggml.merges": _strings(merges),
        "tokenizer.ggml.bos_token_id": first_control,
        "tokenizer.ggml.eos_token_id": first_control + 2,
        "tokenizer.ggml.padding_token_id": first_control,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def write(out: BinaryIO, name: str) -> None:
    """Writes the whole file, a few megabytes at a time."""
    s, kind = parse(name)
    plan: list[tuple[Tensor, str, int]] = []
    for t in tensors(s):
        of = kind if t.kind == "matrix" else "f32"
        plan.append((t, of, t.weights // FORMATS[of].width * FORMATS[of].size))
    values = metadata(name, s, kind)
    out.write(struct.pack("<4sIQQ", b"GGUF", 3, len(plan), len(values)))
    for key, value in values.items():
        out.write(_string(key) + _value(value))
    at = 0
    for t, of, n_bytes in plan:
        out.write(_string(t.name) + struct.pack(f"<I{len(t.dims)}QIQ", len(t.dims), *t.dims, FORMATS[of].code, at))
        at += -(-n_bytes // ALIGNMENT) * ALIGNMENT
    out.write(bytes(-out.tell() % ALIGNMENT))
    for i, (t, of, n_bytes) in enumerate(plan):
        rng = np.random.default_rng([SEED, i])
        if t.kind == "matrix":
            step = CHUNK_BYTES // FORMATS[of].size * FORMATS[of].width
            for start in range(0, t.weights, step):
                out.write(draw(rng, of, min(step, t.weights - start), t.deviation))
        else:
            out.write(small_tensor(t, rng))
        out.write(bytes(-n_bytes % ALIGNMENT))


# ---- by name


def parse(name: str) -> tuple[Shape, str]:
    """The shape and the weight type of a name. Raises ValueError for one that is none."""
    shape, _, kind = name.rpartition("-")
    if shape not in SHAPES or kind not in FORMATS:
        raise ValueError(f"{name} is no SHAPE-TYPE of {', '.join(SHAPES)} and {', '.join(FORMATS)}")
    s, width = SHAPES[shape], FORMATS[kind].width
    if odd := next((t for t in tensors(s) if t.kind == "matrix" and t.dims[0] % width), None):
        raise ValueError(f"{name}: rows of {odd.dims[0]} weights ({odd.name}) are no whole blocks of {width}")
    return s, kind


def is_shape(name: str) -> bool:
    """Whether `shape_model` makes a model of this name."""
    try:
        parse(name)
    except ValueError:
        return False
    return True


def presets() -> list[str]:
    """Every name, by shape and then by type."""
    return [name for shape in SHAPES for kind in FORMATS if is_shape(name := f"{shape}-{kind}")]


def _recipe(name: str) -> str:
    """A digest of all that the file follows from."""
    s, kind = parse(name)
    return hashlib.sha256(repr((RECIPE, SEED, s, FORMATS[kind], known_words(), TEMPLATE)).encode()).hexdigest()


def shape_model(preset: str, cache_dir: Path) -> Path:
    """The file of this name, made if it is not there; one of an older recipe, or one cut off, is made anew. Raises ValueError."""
    path = cache_dir / "shapes" / f"{preset}.gguf"
    stamp = path.with_suffix(".stamp")
    recipe = _recipe(preset)
    if path.is_file() and stamp.is_file() and stamp.read_text() == f"{recipe} {path.stat().st_size}\n":
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".draft{os.getpid()}")
    try:
        with draft.open("wb") as out:
            write(out, preset)
        stamp.unlink(missing_ok=True)
        n = draft.stat().st_size
        draft.replace(path)
        stamp.write_text(f"{recipe} {n}\n")
    finally:
        draft.unlink(missing_ok=True)
    return path


def describe(shape: str) -> str:
    """A line of the list: the shape, and the types it comes in with their megabytes."""
    s = SHAPES[shape]
    n = sum(t.weights for t in tensors(s))
    of_type = sum(t.weights for t in tensors(s) if t.kind == "matrix")
    sizes = {kind: of_type // f.width * f.size + 4 * (n - of_type) for kind, f in FORMATS.items() if is_shape(f"{shape}-{kind}")}
    types = ", ".join(f"{kind} {size / 1e6:.0f}" for kind, size in sizes.items())
    return f"{shape:<12} {n / 1e6:6.1f} M weights, {s.layers:2} layers of {s.hidden:4}: {s.about}\n{'':13}MB: {types}"


def main(argv: list[str] | None = None) -> int:
    from geist_pool import config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="SHAPE-TYPE")
    parser.add_argument("--list", action="store_true", help="the names, with their sizes")
    parser.add_argument("--cache-dir", help="default: the user's cache")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(map(describe, SHAPES)))
    for name in args.names:
        try:
            cache = Path(config.load({"cache_dir": args.cache_dir} if args.cache_dir else {}).cache_dir)
            print(shape_model(name, cache))
        except ValueError as error:
            parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())

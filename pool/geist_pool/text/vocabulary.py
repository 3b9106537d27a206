"""The vocabulary of a model as a value: what its file says about tokens, and the bytes each token stands for.

Two kinds are supported. Byte-level BPE ("gpt2" in GGUF files) writes every byte of a token as one printable
character (the byte alphabet of GPT-2, Radford et al. 2019, `bytes_to_unicode`): bytes that are printable in
Latin-1 stand for themselves, the other 68 are U+0100, U+0101, ... in order of the byte. SentencePiece ("llama")
writes tokens as text with U+2581 for a space, and has tokens for single bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import cast

import msgspec

from geist_pool.errors import ModelError, Unsupported

PRE_TOKENIZERS: dict[str, str] = {
    "smollm": "smollm",
    "llama-bpe": "llama-bpe",
    "qwen2": "qwen2",
    "qwen35": "qwen35",
    "gpt2": "gpt2",
    "gpt-2": "gpt2",
}
"""Values of `tokenizer.ggml.pre` that are understood, to the name used here ("gpt-2" is how files spell gpt2)."""

SPACE = "\u2581"
"""How SentencePiece writes a space."""

# Texts that end a turn or a document wherever they are control or user-defined tokens. Files name only one or two
# end tokens by id, chat models emit the others as well: the list is by text, as other engines keep it.
_END_TEXTS = frozenset(
    {
        "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "</s>", "<eos>",
        "<EOT>", "<end_of_turn>", "<end_of_utterance>",
        # fill-in-the-middle: padding, repository and file separators end what was asked for
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|repo_name|>", "<|fim_repo|>", "<fim-repo>", "<reponame>",
        "<|file_sep|>",
    }
)  # fmt: skip


class TokenType(IntEnum):
    """Kinds of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_PLAIN_TYPES = frozenset(TokenType) - {TokenType.BYTE}  # of them nothing but their number needs to be checked


def _byte_alphabet() -> dict[str, int]:
    """Character of the byte alphabet to the byte it stands for, 256 entries."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in plain}
    others = (b for b in range(256) if b not in plain)
    alphabet.update({chr(0x100 + i): b for i, b in enumerate(others)})
    return alphabet


BYTE_OF_CHAR: dict[str, int] = _byte_alphabet()


class Vocabulary(msgspec.Struct, frozen=True):
    """Everything text needs to know about a model.

    tokens: [n_tokens] strings; normal tokens in the byte alphabet or with U+2581 for spaces, the others as plain text.
    types: [n_tokens] of TokenType.
    merges: "left right" in order of rank; none in SentencePiece.
    scores: [n_tokens], SentencePiece only: the higher, the sooner a token is put together.
    bos, eos, eot: ids named by the file, or None.
    add_bos: the model expects BOS before the first token of a text.
    add_eos: always False (a file that asks for EOS behind every text is refused by `from_metadata`).
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...] = ()
    bos: int | None = None
    eos: int | None = None
    eot: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    chat_template: str | None = None

    @classmethod
    def from_metadata(cls, get: Callable[[str], object]) -> Vocabulary:
        """The vocabulary in a GGUF file's metadata.

        get: value of a key or None: int, float, bool, str, or a list of them; strings inside lists (and
            single strings, if the caller prefers) may be `bytes`, as they stand in the file.
        Raises, with the key in `path`, Unsupported for another tokenizer model, an unknown pre-tokenizer and
        a file that wants EOS behind every text; ModelError for a missing key, a value of the wrong type or
        size, a token that is no UTF-8 (with its index).
        """
        model = _text(get, "tokenizer.ggml.model")
        if model not in ("gpt2", "llama"):
            raise Unsupported(
                f"tokenizer model {model!r} is not supported; byte-level BPE (gpt2) and SentencePiece (llama) are",
                path="tokenizer.ggml.model",
            )
        pre = _pre_tokenizer(get) if model == "gpt2" else "default"
        if model == "llama":
            _check_sentencepiece(get)
        tokens = _strings(get, "tokenizer.ggml.tokens")
        types = _types(get, len(tokens))
        ids = {name: _token_id(get, f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in ("bos", "eos", "eot")}
        add_bos = _flag(get, "tokenizer.ggml.add_bos_token")
        if add_bos and ids["bos"] is None:
            raise ModelError("the file asks for BOS and names no BOS token", path="tokenizer.ggml.bos_token_id")
        if add_bos is None:
            # Llama-3 and SentencePiece models are trained with BOS, and files that do not say so are read that way elsewhere too.
            add_bos = (pre == "llama-bpe" or model == "llama") and ids["bos"] is not None
        if _flag(get, "tokenizer.ggml.add_eos_token"):
            raise Unsupported(
                "the file asks for EOS behind every text; a context that ends so cannot be continued",
                path="tokenizer.ggml.add_eos_token",
            )
        template = get("tokenizer.chat_template")
        return cls(
            model=model,
            pre=pre,
            tokens=tokens,
            types=types,
            merges=_strings(get, "tokenizer.ggml.merges") if model == "gpt2" else (),
            scores=_scores(get, len(tokens)) if model == "llama" else (),
            bos=ids["bos"],
            eos=ids["eos"],
            eot=ids["eot"],
            add_bos=add_bos,
            chat_template=None if template is None else _text(get, "tokenizer.chat_template"),
        )

    def is_control(self, token: int) -> bool:
        """Whether the id is a control token: it steers the model and is no part of what was said."""
        return self.types[token] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def piece(self, token: int) -> bytes:
        """The bytes the id stands for; those of its name for a control token, none for an unused id.

        Raises IndexError for an id outside the vocabulary.
        """
        if token < 0:
            raise IndexError(f"token id {token} is negative")
        text = self.tokens[token]
        kind = self.types[token]
        if kind == TokenType.UNUSED:
            return b""
        if kind == TokenType.BYTE:
            return bytes((int(text[1:-1], 16),))  # "<0x0A>", checked by from_metadata
        if kind == TokenType.NORMAL and self.model == "llama":
            return text.replace(SPACE, " ").encode("utf-8")
        if kind == TokenType.NORMAL:
            try:
                return bytes([BYTE_OF_CHAR[c] for c in text])
            except KeyError:
                # A character outside the byte alphabet (a space, say): the token was added as plain text.
                return text.encode("utf-8")
        return text.encode("utf-8")

    def special_ids(self) -> list[int]:
        """The ids that are no normal tokens, in their order: few among many."""
        return [found.start() for found in re.finditer(rb"[^\x01]", bytes(self.types))]

    def longest_piece(self) -> int:
        """Bytes of the longest `piece`."""
        most = list(map(len, map(str.encode, self.tokens)))  # a piece is never longer than its text
        longest = len(self.piece(most.index(max(most))))
        for i, n in enumerate(most):
            if n > longest:
                longest = max(longest, len(self.piece(i)))
        return longest

    def end_ids(self) -> frozenset[int]:
        """Ids that end a generation: those the file names and those known by their text."""
        ends = {t for t in (self.eos, self.eot) if t is not None}
        by_kind = {TokenType.CONTROL: _END_TEXTS, TokenType.USER_DEFINED: _END_TEXTS - {"</s>"}}  # in Gemma 3 that is HTML
        ends.update(i for i in self.special_ids() if self.tokens[i] in by_kind.get(TokenType(self.types[i]), ()))
        return frozenset(ends)


def _pre_tokenizer(get: Callable[[str], object]) -> str:
    pre = _text(get, "tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise Unsupported(f"pre-tokenizer {pre!r} is not supported; supported are {known}", path="tokenizer.ggml.pre")
    return PRE_TOKENIZERS[pre]


def _check_sentencepiece(get: Callable[[str], object]) -> None:
    """Refuses what would change a text before it is cut into pieces."""
    if _flag(get, "tokenizer.ggml.add_space_prefix") is not False:
        raise Unsupported(
            "the file asks for a space before every text (or does not say that it does not); then the pieces of a text "
            "are not those of its parts",
            path="tokenizer.ggml.add_space_prefix",
        )
    for key in ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap"):
        if get(key):
            raise Unsupported("the file asks for texts to be normalised, which is not supported", path=key)


def _scores(get: Callable[[str], object], n_tokens: int) -> tuple[float, ...]:
    key = "tokenizer.ggml.scores"
    values = _list(get, key)
    if len(values) != n_tokens:
        raise ModelError(f"{key} has {len(values)} entries for {n_tokens} tokens", path=key)
    for i, value in enumerate(values):
        if not isinstance(value, float) or not math.isfinite(value):
            raise ModelError(f"{key}[{i}] is {value!r}, not a finite number", path=key, index=i)
    return tuple(cast("Sequence[float]", values))


def _text(get: Callable[[str], object], key: str) -> str:
    value = get(key)
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{key} is not UTF-8: {error.reason} at byte {error.start}", path=key) from None
    if not isinstance(value, str):
        raise ModelError(f"{key} is {'missing' if value is None else 'not a string'}", path=key)
    return value


def _list(get: Callable[[str], object], key: str) -> Sequence[object]:
    value = get(key)
    if not isinstance(value, list | tuple):
        raise ModelError(f"{key} is {'missing' if value is None else 'not an array'}", path=key)
    return cast("Sequence[object]", value)


def _strings(get: Callable[[str], object], key: str) -> tuple[str, ...]:
    values = _list(get, key)
    try:
        return tuple(map(bytes.decode, cast("Sequence[bytes]", values)))
    except (TypeError, UnicodeDecodeError):
        pass  # one by one, then, to say which
    out: list[str] = []
    for i, value in enumerate(values):
        if isinstance(value, bytes):
            try:
                out.append(value.decode("utf-8"))
            except UnicodeDecodeError as error:
                message = f"{key}[{i}] is not UTF-8: {error.reason} at byte {error.start}"
                raise ModelError(message, path=key, index=i) from None
        elif isinstance(value, str):
            out.append(value)
        else:
            raise ModelError(f"{key}[{i}] is not a string", path=key, index=i)
    return tuple(out)


def _types(get: Callable[[str], object], n_tokens: int) -> tuple[int, ...]:
    key = "tokenizer.ggml.token_type"
    values = _list(get, key)
    if len(values) != n_tokens:
        raise ModelError(f"{key} has {len(values)} entries for {n_tokens} tokens", path=key)
    if set(map(type, values)) <= {int} and set(values) <= _PLAIN_TYPES:
        return tuple(cast("Sequence[int]", values))
    tokens = _list(get, "tokenizer.ggml.tokens")
    for i, value in enumerate(values):
        if type(value) is not int or not 1 <= value <= 6:
            raise ModelError(f"{key}[{i}] is {value!r}, not a kind of token (1 to 6)", path=key, index=i)
        if value == TokenType.BYTE and not _is_byte_name(tokens[i]):
            raise ModelError(f"token {i} is a byte token and not named like <0x0A>", path=key, index=i)
    return tuple(cast("Sequence[int]", values))


def _is_byte_name(name: object) -> bool:
    text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
    if len(text) != 6 or not text.startswith("<0x") or not text.endswith(">"):
        return False
    return all(c in "0123456789abcdefABCDEF" for c in text[3:5])


def _token_id(get: Callable[[str], object], key: str, n_tokens: int) -> int | None:
    value = get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < n_tokens:
        raise ModelError(f"{key} is {value!r}, outside the vocabulary of {n_tokens} tokens", path=key)
    return value


def _flag(get: Callable[[str], object], key: str) -> bool | None:
    value = get(key)
    if value is not None and type(value) is not bool:
        raise ModelError(f"{key} is {value!r}, not a boolean", path=key)
    return value

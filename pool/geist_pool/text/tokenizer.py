"""Text to token ids with the `tokenizers` library, and ids back to bytes with our own table.

Of byte-level BPE two encoders share one model: one that knows every added token, and one for text in which control
tokens are ordinary characters (user-defined tokens are cut out of the text by both). Neither ever adds BOS. SentencePiece
has a file of its own.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, Literal

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from geist_pool.errors import BadRequest, ModelError, Unsupported
from geist_pool.text.checks import check_encodable
from geist_pool.text.sentencepiece import SentencePiece
from geist_pool.text.vocabulary import BYTE_OF_CHAR, SPACE, TokenType, Vocabulary

# The pieces that BPE works on separately, per `tokenizer.ggml.pre`, as the models' own tokenizer files state
# them. smollm (single digits first) and gpt2 use the regex that is built into ByteLevel, GPT-2's own.
_SPLIT = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}

_NFC = frozenset({"qwen2", "qwen35"})  # the files do not say so; the models' tokenizer files do
_WHOLE_WORDS = frozenset({"llama-bpe"})  # a piece that is a token is that token, whatever its merges give

_GPT2 = frozenset({"smollm", "gpt2"})  # cut by GPT-2's own regex
LEFTS: Final = 128  # texts before a join whose ids are kept for the next look
LABELS: Final = 1024  # labels whose ids are kept, and the longest of them in characters: ten megabytes at the very most
LABEL_LENGTH: Final = 64

# Kinds of token that are cut out of the text before BPE rather than put together by it.
_ADDED = frozenset({TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED})


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _SPLIT:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre == "gpt2":
        return byte_level
    raise Unsupported(f"pre-tokenizer {pre!r} is not supported", path="tokenizer.ggml.pre")


def _reachable(vocabulary: Vocabulary) -> dict[str, int]:
    """Ids by the texts that BPE may put together; see `Tokenizer._bpe`."""
    vocab = dict(zip(vocabulary.tokens, range(len(vocabulary.tokens)), strict=True))
    if len(vocab) == len(vocabulary.tokens):  # no text is there twice
        for i in vocabulary.special_ids():
            if vocabulary.types[i] in _ADDED:
                del vocab[vocabulary.tokens[i]]
                vocab[f"\0{i}"] = i
        if "" in vocab:
            vocab[f"\0{vocab['']}"] = vocab.pop("")
        return vocab
    vocab = {}
    for i, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        reachable = kind not in _ADDED and text and text not in vocab
        vocab[text if reachable else f"\0{i}"] = i
    return vocab


class Tokenizer:
    """Encoder and byte table of one vocabulary. Immutable; any number of threads may use it at once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Takes about a third of a second for 250,000 tokens.

        Raises ModelError for merges that do not fit the vocabulary.
        """
        self.vocabulary = vocabulary
        self.eog: frozenset[int] = vocabulary.end_ids()
        """Ids that end a generation."""
        cut = [(i, vocabulary.types[i]) for i in vocabulary.special_ids() if vocabulary.types[i] in _ADDED]
        self._pieces = SentencePiece(vocabulary) if vocabulary.model == "llama" else None
        if self._pieces is None:
            model = self._bpe(vocabulary)
            self._plain, self._plain_ids = self._encoder(model, [i for i, t in cut if t == TokenType.USER_DEFINED])
            self._special, self._special_ids = self._encoder(model, [i for i, _ in cut])
        self._control_texts = tuple(vocabulary.tokens[i] for i, _ in cut if vocabulary.is_control(i) and vocabulary.tokens[i])
        added = sorted({vocabulary.tokens[i] for i, _ in cut} - {""}, key=len, reverse=True)
        self._added_pattern = re.compile("(" + "|".join(map(re.escape, added)) + ")") if added else re.compile("($^)")
        # SmolLM2 has no token for U+0004 and other control characters; BPE would drop them without a word.
        present = set(vocabulary.tokens)
        self._spaced = any(char.isspace() for text in added for char in text)  # such a token may lie across a cut
        self._left = lru_cache(LEFTS)(self._encoded)  # the labels of a request follow the same text
        self._labels = lru_cache(LABELS)(self._encoded)  # and are often those of the last one
        self._missing = bytes(b for char, b in BYTE_OF_CHAR.items() if char not in present and self._pieces is None)

    @staticmethod
    def _bpe(vocabulary: Vocabulary) -> models.BPE:
        """The BPE model, in which added tokens cannot be reached by merging characters.

        Their entries get names that start with NUL, which is no character of the byte alphabet: otherwise
        text could reach a control token through the whole-word shortcut, or through merges. The same for
        a text that occurs twice (the lower id keeps it) or is empty.
        """
        vocab = _reachable(vocabulary)
        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
        try:
            return models.BPE(vocab=vocab, merges=merges, ignore_merges=vocabulary.pre in _WHOLE_WORDS)
        except Exception as error:  # the library has no type of its own for it; which merge it was is for us to find
            for rank, (left, right) in enumerate(merges):
                if left not in vocab or right not in vocab or left + right not in vocab:
                    raise ModelError(
                        f"merge {rank} ({vocabulary.merges[rank]!r}) does not join two tokens into a third",
                        path="tokenizer.ggml.merges",
                        index=rank,
                    ) from None
            raise ModelError(f"the merges cannot be used: {error}", path="tokenizer.ggml.merges") from error

    def _encoder(self, model: models.BPE, added: list[int]) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """An encoder that cuts the tokens `added` out of the text, and its ids for them -> ours where they differ."""
        encoder = tokenizers.Tokenizer(model)
        if self.vocabulary.pre in _NFC:
            encoder.normalizer = normalizers.NFC()
        encoder.pre_tokenizer = _pre_tokenizer(self.vocabulary.pre)
        ids: dict[str, int] = {}
        for i in added:
            ids.setdefault(self.vocabulary.tokens[i], i)
        ids.pop("", None)
        encoder.add_tokens([AddedToken(text, normalized=False) for text in ids])
        translate: dict[int, int] = {}
        for text, ours in ids.items():
            theirs = encoder.token_to_id(text)
            assert theirs is not None
            if theirs != ours:
                translate[theirs] = ours
        return encoder, translate

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of `text`, never with BOS. With `special`, text of control tokens becomes control tokens.

        Raises BadRequest, with the position in characters, for a lone surrogate and for a character that
        this vocabulary has no tokens for.
        """
        self.check(text)
        if self._pieces is not None:
            return self._pieces.encode(text, special=special)
        encoder, ids = (self._special, self._special_ids) if special else (self._plain, self._plain_ids)
        # A batch of one: `encode` keeps the interpreter's lock, for seconds with a text of megabytes, and nobody else in
        # the process would get a word in.
        (found,) = encoder.encode_batch_fast([text], add_special_tokens=False)
        return [ids.get(i, i) for i in found.ids] if ids else list(found.ids)

    def normalize(self, text: str) -> str:
        """`text` as the ids of `encode(text, special=True)` spell it: in NFC where the model wants that.

        Text of added tokens stays as it is, and nothing is composed across it. In SentencePiece U+2581 is a space.
        """
        if self._pieces is not None:
            return text.replace(SPACE, " ")
        if self.vocabulary.pre not in _NFC or unicodedata.is_normalized("NFC", text):
            return text
        parts = self._added_pattern.split(text)  # texts of added tokens at the odd places
        return "".join(p if i % 2 else unicodedata.normalize("NFC", p) for i, p in enumerate(parts))

    def check(self, text: str, path: str | None = None) -> None:
        """Refuse what `encode` refuses: BadRequest with `path` and the position in characters."""
        check_encodable(text, path)
        data = text.encode("utf-8")
        if len(data.translate(None, delete=self._missing)) == len(data):
            return
        position = next(i for i, char in enumerate(text) if any(b in self._missing for b in char.encode("utf-8")))
        raise BadRequest(
            f"the model's vocabulary has no token for U+{ord(text[position]):04X} at position {position}",
            path=path,
            position=position,
        )

    def bos(self) -> list[int]:
        """What opens a context or a whole prompt: [BOS] if the model's file asks for it, else []."""
        if not self.vocabulary.add_bos or self.vocabulary.bos is None:
            return []
        return [self.vocabulary.bos]

    def is_control(self, token: int) -> bool:
        """Whether the id is a control token."""
        return self.vocabulary.is_control(token)

    def piece(self, token: int) -> bytes:
        """The bytes of one id; see `Vocabulary.piece`."""
        return self.vocabulary.piece(token)

    def decode_bytes(self, ids: Iterable[int], *, special: bool) -> bytes:
        """The bytes of `ids` one after another; control tokens by name with `special`, else left out."""
        return b"".join(self.piece(i) for i in ids if special or not self.is_control(i))

    def has_control_text(self, text: str) -> tuple[int, str] | None:
        """The first control token written out in `text`: its position in characters and its name, or None.

        Of several at the same position the longest. Takes one fast search per control token.
        """
        found = [(at, -len(name), name) for name in self._control_texts if (at := text.find(name)) >= 0]
        if not found:
            return None
        at, _, name = min(found)
        return at, name

    def join(
        self, left_ids: Sequence[int], right: str, right_ids: Sequence[int] | None = None, *, special: bool = False
    ) -> Literal["clean", "split"]:
        """Whether tokenising `right` on its own cut through what would be one token with the text before it.

        right_ids: `encode(right)`, if that is known. left_ids: the last few ids on the left (eight are plenty). Their text is
        taken from behind the last added token (nothing merges across one) and from the first whole character on. The join is
        "clean" if the ids of that text and of `right`, made apart, equal those of both together, else "split". Where the left
        ends inside a character no text merges with it: "clean"."""
        if not left_ids or not right or self._surely_cut(self.piece(left_ids[-1])[-1:], right[0]):
            return "clean"
        text = self._mergeable_text(left_ids)
        if not text:
            return "clean"
        apart = [*self._left(text, special), *(self.encode(right, special=special) if right_ids is None else right_ids)]
        return "clean" if self.encode(text + right, special=special) == apart else "split"

    def _surely_cut(self, left: bytes, right: str) -> bool:
        """Whether the pre-tokenizer always cuts between this last byte and this first character, so that nothing needs trying.

        No piece has white space behind anything else, but for line ends behind punctuation outside GPT-2's own regex.
        SentencePiece has no pre-tokenizer, and its pieces may hold a space anywhere.
        """
        if self._pieces is not None or self._spaced or right not in " \t\r\n" or not left.isascii() or left.isspace() or not left:
            return False
        return right == " " or self.vocabulary.pre in _GPT2 or left.isalnum()

    def label_ids(self, text: str, *, special: bool) -> tuple[int, ...]:
        """`encode(text)`, remembered while the text is among the last LABELS short ones. Raises BadRequest."""
        return self._labels(text, special) if len(text) <= LABEL_LENGTH else self._encoded(text, special)

    def _encoded(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self.encode(text, special=special))

    def _mergeable_text(self, ids: Sequence[int]) -> str:
        """The text at the end of `ids` that could merge with text behind it; "" if there is none."""
        # In SentencePiece runs of spaces and of newlines are added tokens, and a longer run is another one.
        ends = _ADDED if self._pieces is None else _ADDED - {TokenType.USER_DEFINED}
        first = len(ids)
        while first > 0 and self.vocabulary.types[ids[first - 1]] not in ends:
            first -= 1
        data = self.decode_bytes(ids[first:], special=True)
        while True:
            try:
                return data.decode("utf-8")
            except UnicodeDecodeError as error:
                if error.end == len(data):
                    return ""
                data = data[error.end :]

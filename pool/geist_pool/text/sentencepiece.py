"""SentencePiece's BPE (Kudo and Richardson, 2018): pieces are put together by their scores, no list of merges.

A text is cut at its added tokens; between them spaces are written as U+2581, and of all neighbours that make a piece of
the vocabulary together the pair whose piece has the highest score is joined first, of equal scores the leftmost one,
until none is left. What is no piece then is spelled by byte tokens. Written out here and not given to `tokenizers` as
merges: there the two ways to put one piece together ("a" "aa" and "aa" "a") get different ranks, and ids differ on runs
of one character.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator

import tokenizers
from tokenizers import AddedToken, models

from geist_pool.errors import ModelError
from geist_pool.text.vocabulary import SPACE, TokenType, Vocabulary

_REMEMBERED = 1 << 16  # words whose ids are kept


class SentencePiece:
    """Ids of one vocabulary's texts. Any number of threads may use it at once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises ModelError for a vocabulary that cannot spell every byte."""
        self._ids: dict[str, int] = {}  # of what merging can reach: texts of control tokens cannot be
        self._bytes: dict[int, int] = {}
        for i, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
            if kind == TokenType.NORMAL and text:
                self._ids.setdefault(text, i)
            elif kind == TokenType.BYTE:
                self._bytes.setdefault(int(text[1:-1], 16), i)
        if missing := set(range(256)) - set(self._bytes):
            raise ModelError(f"the vocabulary has no token for byte 0x{min(missing):02X}", path="tokenizer.ggml.tokens")
        self._scores = vocabulary.scores
        kinds = {TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED}
        self._special = _Cutter(vocabulary, kinds)
        self._plain = _Cutter(vocabulary, {TokenType.USER_DEFINED})
        self._border = _word_border(self._ids)
        self._words: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of `text`; with `special`, text of control tokens becomes control tokens."""
        out: list[int] = []
        for added, piece in (self._special if special else self._plain).cut(text):
            if added is not None:
                out.append(added)
                continue
            for word in self._border.split(piece.replace(" ", SPACE)):
                found = self._words.get(word)
                if found is None:
                    found = tuple(self._encode_word(word))
                    if len(self._words) >= _REMEMBERED:
                        self._words.clear()
                    self._words[word] = found
                out.extend(found)
        return out

    def _encode_word(self, word: str) -> Iterator[int]:
        for piece in self._merged(word):
            if (known := self._ids.get(piece)) is not None:
                yield known
            else:
                yield from (self._bytes[b] for b in piece.encode("utf-8"))

    def _merged(self, word: str) -> list[str]:
        """The pieces of `word` once no two neighbours make one; characters that are no piece stand alone."""
        pieces = list(word)  # a piece lies at its first character's place, "" at the others
        before = list(range(-1, len(word) - 1))
        after = list(range(1, len(word) + 1))
        heap: list[tuple[float, int, int, str]] = []  # (-score, left, right, both together)

        def propose(left: int, right: int) -> None:
            if left >= 0 and right < len(pieces):
                both = pieces[left] + pieces[right]
                if (known := self._ids.get(both)) is not None:
                    heapq.heappush(heap, (-self._scores[known], left, right, both))

        for i in range(len(pieces) - 1):
            propose(i, i + 1)
        while heap:
            _, left, right, both = heapq.heappop(heap)
            if not pieces[left] or after[left] != right or pieces[left] + pieces[right] != both:
                continue  # one of them was joined to another meanwhile
            pieces[left], pieces[right] = both, ""
            after[left] = after[right]
            if after[right] < len(pieces):
                before[after[right]] = left
            propose(before[left], left)
            propose(left, after[left])
        return [p for p in pieces if p]


class _Cutter:
    """Cuts the tokens of some kinds out of a text, at each place the longest."""

    def __init__(self, vocabulary: Vocabulary, kinds: set[TokenType]) -> None:
        rest = "\0"  # stands for everything between them: the only word this model knows
        self._encoder = tokenizers.Tokenizer(models.WordLevel({rest: 0}, unk_token=rest))
        ours: dict[str, int] = {}
        for i, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
            if kind in kinds and text:
                ours.setdefault(text, i)
        self._encoder.add_tokens([AddedToken(text, normalized=False) for text in ours if text != rest])
        self._ours = {self._encoder.token_to_id(text): i for text, i in ours.items() if text != rest}

    def cut(self, text: str) -> Iterator[tuple[int | None, str]]:
        """(id, text) of added tokens and (None, text) of what lies between them, in order."""
        # A batch of one: `encode` keeps the interpreter's lock. The fast kind of batch would leave out the offsets.
        (encoding,) = self._encoder.encode_batch([text], add_special_tokens=False)
        for theirs, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            yield self._ours.get(theirs), text[begin:end]


def _word_border(pieces: dict[str, int]) -> re.Pattern[str]:
    """Where a text may be cut without a change: before a space behind a character that no piece holds before one.

    No piece reaches across such a place, so the two sides know nothing of each other.
    """
    held = {SPACE}
    for piece in pieces:
        at = piece.find(SPACE, 1)
        while at >= 0:
            held.add(piece[at - 1])
            at = piece.find(SPACE, at + 1)
    return re.compile(f"(?<=[^{''.join(map(re.escape, sorted(held)))}])(?={SPACE})")

"""From the bytes of generated tokens to text: whole characters, and stop strings.

A token is a run of bytes that may start or end inside a character, and a stop string may begin in one token
and end in another. Both classes give the same result however the bytes are cut into pieces. A worker imports
this module, so it imports neither a tokenizer nor a template engine.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class ByteStream:
    """Incremental UTF-8: `feed` gives the text that is certain, `finish` what is left.

    Bytes are held back while they may still become a character (at most 3); bytes that cannot become one are
    U+FFFD, the same number of them as in `bytes.decode("utf-8", "replace")` over the whole.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Text completed by `data`, without what may still become a character."""
        text = self._decoder.decode(data)
        held = self.held
        if len(held) > 1 and held[0] == 0xED and held[1] >= 0xA0:
            # The start of a surrogate, which Python's decoder keeps although no byte makes a character of it.
            text += self._decoder.decode(b"", final=True)
        return text

    def finish(self) -> str:
        """U+FFFD for bytes still held back, or ""; the stream then starts afresh."""
        return self._decoder.decode(b"", final=True)

    @property
    def held(self) -> bytes:
        """The bytes held back now, at most 3."""
        return self._decoder.getstate()[0]


class StopMatcher:
    """Finds the stop string that is complete first and lets no byte of it through.

    "First" is by where a stop string ends; of several that end at the same byte the longest wins, of equal
    ones the lower index. Bytes that may still become part of a stop string are held back: at most the longest
    stop string less one byte.
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        """`stops` are non-empty byte strings; none at all is allowed and lets everything through.

        Raises ValueError for an empty stop string (it would match before the first byte).
        """
        if any(len(stop) == 0 for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._prefixes = frozenset(stop[:n] for stop in stops for n in range(1, len(stop)))
        self._longest_prefix = max((len(p) for p in self._prefixes), default=0)
        self._held = b""
        self._matched: int | None = None

    @property
    def held(self) -> bytes:
        """Bytes fed and not yet emitted."""
        return self._held

    def feed(self, data: bytes) -> tuple[bytes, int | None]:
        """The bytes that are certain not to be part of a stop string, and the index of the stop string found.

        On a match the bytes emitted in all end exactly before the stop string; what came behind it is gone,
        and every later call gives (b"", the same index).
        """
        if self._matched is not None:
            return b"", self._matched
        # The held bytes contain no complete stop string, so the leftmost occurrence ends first.
        pending = self._held + data
        best: tuple[int, int, int] | None = None  # (end, start, index): least end, then longest, then first
        for index, stop in enumerate(self._stops):
            start = pending.find(stop)
            if start >= 0:
                found = (start + len(stop), start, index)
                if best is None or found < best:
                    best = found
        if best is not None:
            self._matched = best[2]
            self._held = b""
            return pending[: best[1]], self._matched
        for n in range(min(self._longest_prefix, len(pending)), 0, -1):
            if pending[-n:] in self._prefixes:
                self._held = pending[-n:]
                return pending[:-n], None
        self._held = b""
        return pending, None

    def finish(self) -> bytes:
        """The bytes still held back: the stream ended, so they are no stop string."""
        held, self._held = self._held, b""
        return held

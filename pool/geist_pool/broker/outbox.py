"""Messages that a slow reader has not taken yet. The socket is an argument; nothing here blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal

Outcome = Literal["sent", "full", "gone"]
Frames = Sequence[bytes]
Send = Callable[[Frames], Outcome]
LastWord = Callable[[], Frames]
"""Makes the few bytes that end a request whose answer cannot be kept."""

LAST_WORDS_MAX: Final = 1 << 14
"""For one peer, which goes on asking and does not read."""


def _size(frames: Frames) -> int:
    return sum(map(len, frames))


class _Line:
    """What is kept for one peer, in order: first what was too much once and has become last words, then whole messages."""

    __slots__ = ("last_words", "n_bytes", "whole")

    def __init__(self) -> None:
        self.last_words: deque[Frames] = deque()
        self.whole: deque[tuple[Frames, LastWord | None]] = deque()
        self.n_bytes = 0  # of the whole ones

    def __len__(self) -> int:
        return len(self.last_words) + len(self.whole)

    def head(self) -> Frames | None:
        return self.last_words[0] if self.last_words else self.whole[0][0] if self.whole else None

    def pop(self) -> None:
        if self.last_words:
            self.last_words.popleft()
        else:
            self.n_bytes -= _size(self.whole.popleft()[0])


class Outbox:
    """Sends in order per peer. What a peer cannot take now is kept, up to a limit per peer.

    send: hands one message to the socket or says why not. messages_max, bytes_max: what is kept for one peer.
    """

    def __init__(self, send: Send, *, messages_max: int, bytes_max: int) -> None:
        self._send = send
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._kept: dict[bytes, _Line] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def send(self, frames: Frames, last_word: LastWord | None = None) -> Literal["sent", "kept", "gone", "over"]:
        """`frames[0]` is the peer. "over": it has not taken so much that this message is not kept any more; see `shed`."""
        peer = frames[0]
        line = self._kept.get(peer)
        if line is None:
            outcome = self._send(frames)
            if outcome != "full":
                return outcome
            line = _Line()
        size = _size(frames)
        if len(line.whole) >= self._messages_max or line.n_bytes + size > self._bytes_max:
            return "over"
        self._kept[peer] = line
        line.whole.append((frames, last_word))
        line.n_bytes += size
        return "kept"

    def shed(self, frames: Frames, last_word: LastWord | None) -> int:
        """After "over": of what is kept for the peer, and of the message that was too much, only last words stay, so that every
        request still ends. How many messages are lost."""
        line = self._kept.setdefault(frames[0], _Line())
        lost = 0
        for message, word in (*line.whole, (frames, last_word)):
            short = None if word is None else word()
            if short is None or len(line.last_words) >= LAST_WORDS_MAX:
                lost += 1
            elif _size(short) < _size(message):
                lost += 1
                line.last_words.append(short)
            else:
                line.last_words.append(message)
        line.whole.clear()
        line.n_bytes = 0
        if not len(line):
            del self._kept[frames[0]]
        return lost

    def flush(self) -> list[bytes]:
        """Tries again what was kept; the peers that turned out to be gone."""
        gone: list[bytes] = []
        for peer, line in list(self._kept.items()):
            while (frames := line.head()) is not None:
                outcome = self._send(frames)
                if outcome == "full":
                    break
                if outcome == "gone":
                    gone.append(peer)
                    break
                line.pop()
            else:
                del self._kept[peer]
        return gone

    def drop(self, peer: bytes) -> int:
        """Forgets what was kept for a peer; how many messages that were."""
        line = self._kept.pop(peer, None)
        return 0 if line is None else len(line)

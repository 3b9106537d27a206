"""Messages that a slow reader has not taken yet. The socket is an argument; nothing here blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

Outcome = Literal["sent", "full", "gone"]
Send = Callable[[Sequence[bytes]], Outcome]


class Outbox:
    """Sends in order per peer. What a peer cannot take now is kept, up to a limit per peer.

    send: hands one message to the socket or says why not. messages_max, bytes_max: what is kept for one peer.
    """

    def __init__(self, send: Send, *, messages_max: int, bytes_max: int) -> None:
        self._send = send
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._kept: dict[bytes, deque[Sequence[bytes]]] = {}
        self._bytes: dict[bytes, int] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def send(self, frames: Sequence[bytes]) -> Literal["sent", "kept", "gone", "over"]:
        """`frames[0]` is the peer. "over": it has not taken so much that this message is not kept any more."""
        peer = frames[0]
        if peer not in self._kept:
            outcome = self._send(frames)
            if outcome != "full":
                return outcome
        size = sum(map(len, frames))
        kept = self._kept.get(peer, ())
        if len(kept) >= self._messages_max or self._bytes.get(peer, 0) + size > self._bytes_max:
            return "over"
        self._kept.setdefault(peer, deque()).append(frames)
        self._bytes[peer] = self._bytes.get(peer, 0) + size
        return "kept"

    def flush(self) -> list[bytes]:
        """Tries again what was kept; the peers that turned out to be gone."""
        gone: list[bytes] = []
        for peer in list(self._kept):
            line = self._kept[peer]
            while line:
                outcome = self._send(line[0])
                if outcome == "full":
                    break
                if outcome == "gone":
                    gone.append(peer)
                    break
                self._bytes[peer] -= sum(map(len, line.popleft()))
            if not line:
                self.drop(peer)
        return gone

    def drop(self, peer: bytes) -> int:
        """Forgets what was kept for a peer; how many messages that were."""
        self._bytes.pop(peer, None)
        return len(self._kept.pop(peer, ()))

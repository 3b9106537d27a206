"""Answers that are remembered for a while, so that a request sent again is not computed again. Pure.

A client that lost its connection, or did not wait long enough, sends the same request under the same id. Kept are answers, not
errors: what was refused may be possible now. They are kept encoded, so that their size is known.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec
from msgspec import Struct

from geist_pool.protocol import Reply

RepeatKey = tuple[str, bytes, bytes]
"""Space, request id, hash of the request's body: what has all three is the same request."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Reply).decode


class _Kept(Struct, frozen=True):
    since: float
    reply: bytes


class Remembered:
    """Final replies by request, for `seconds` at most, and no more than `replies` of `n_bytes` bytes together."""

    def __init__(self, *, seconds: float, replies: int, n_bytes: int) -> None:
        self._seconds = seconds
        self._replies = replies
        self._n_bytes = n_bytes
        self._kept: OrderedDict[RepeatKey, _Kept] = OrderedDict()  # oldest first
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def n_bytes(self) -> int:
        return self._bytes

    def keep(self, key: RepeatKey, reply: Reply, now: float) -> None:
        self.forget(key)
        body = _encode(reply)
        self._kept[key] = _Kept(now, body)
        self._bytes += len(body)
        while len(self._kept) > self._replies or self._bytes > self._n_bytes:
            self.forget(next(iter(self._kept)))

    def find(self, key: RepeatKey, now: float) -> Reply | None:
        self.expire(now)
        kept = self._kept.get(key)
        return None if kept is None else _decode(kept.reply)

    def forget(self, key: RepeatKey) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes -= len(kept.reply)

    def expire(self, now: float) -> None:
        """Lets go of what is too old."""
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if now - kept.since < self._seconds:
                return
            self.forget(key)

    def validate(self) -> None:
        """AssertionError on any contradiction."""
        assert self._bytes == sum(len(k.reply) for k in self._kept.values()) <= self._n_bytes
        assert len(self._kept) <= self._replies

"""Which clients came by which connection, so that the end of a connection is known to be theirs. No socket here.

A connection is known by its descriptor, whose number is used again as soon as it is closed. What the socket's monitor says is in
the order of what happened, so it is to be read up before each message: then a number means one connection.
"""

from __future__ import annotations


class Peers:
    def __init__(self) -> None:
        self._fds: dict[bytes, int] = {}  # by client
        self._peers: dict[int, set[bytes]] = {}  # and back
        self._open: set[int] = set()

    def accepted(self, fd: int) -> None:
        self._open.add(fd)

    def disconnected(self, fd: int) -> list[bytes]:
        """The clients that came by this connection; they are gone, `forget` is the caller's."""
        self._open.discard(fd)
        return sorted(self._peers.get(fd, ()))

    def met(self, peer: bytes, fd: int) -> bool:
        """A message of this client came by this connection. False if the client is known by another one, which is gone then."""
        known = self._fds.setdefault(peer, fd)
        if known == fd:
            self._peers.setdefault(fd, set()).add(peer)
        return known == fd

    def is_gone(self, peer: bytes) -> bool:
        """Whether its connection had ended before its message was read."""
        return peer in self._fds and self._fds[peer] not in self._open

    def forget(self, peer: bytes) -> None:
        fd = self._fds.pop(peer, None)
        if fd is not None:
            self._peers[fd].discard(peer)
            if not self._peers[fd]:
                del self._peers[fd]

"""Sums of the bytes that contexts take, of the pool and of each space, and how much is too much. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

from geist_pool.broker.entries import Entry, Piece
from geist_pool.errors import StoreFull


class Quota(Protocol):
    """The most that a space may take; 0 means no limit of its own. `config.SpaceQuota` is one."""

    @property
    def memory(self) -> int: ...  # bytes of shared memory
    @property
    def queue(self) -> int: ...  # requests that wait
    @property
    def contexts(self) -> int: ...


class Ledger:
    """Bytes in use, and how many of them only mappings keep; the same by space, and how many contexts each space has."""

    def __init__(self, limit: int, quotas: Mapping[str, Quota]) -> None:
        self.limit = limit
        self.quotas = quotas
        self.used = 0
        self.unmapping = 0
        self.used_in: Counter[str] = Counter()
        self.unmapping_in: Counter[str] = Counter()
        self.contexts_in: Counter[str] = Counter()  # granted and sealed

    def count(self, space: str, piece: Piece) -> None:
        """Brings the sums up to what the object is now: named, only mapped, or gone."""
        alive, nameless = piece.alive, piece.alive and not piece.linked
        if alive != piece.counted:
            n = piece.n_bytes if alive else -piece.n_bytes
            self.used += n
            _add(self.used_in, space, n)
            piece.counted = alive
        if nameless != piece.nameless:
            n = piece.n_bytes if nameless else -piece.n_bytes
            self.unmapping += n
            _add(self.unmapping_in, space, n)
            piece.nameless = nameless

    def resize(self, space: str, piece: Piece, n_bytes: int) -> None:
        """The object turned out to have another size than was reserved."""
        assert piece.counted and not piece.nameless
        self.used += n_bytes - piece.n_bytes
        _add(self.used_in, space, n_bytes - piece.n_bytes)
        piece.n_bytes = n_bytes

    def context(self, space: str, n: int) -> None:
        """One more (1) or less (-1)."""
        _add(self.contexts_in, space, n)

    # ---- how much is missing; 0 or less is nothing

    def missing(self, needed: int) -> int:
        """Bytes that have to go so that `needed` fit once everything is unmapped that has no name."""
        return self.used - self.unmapping + needed - self.limit

    def missing_in(self, space: str, needed: int) -> int:
        """The same for the space's own limit."""
        limit = self.memory_of(space)
        return 0 if limit == 0 else self.used_in[space] - self.unmapping_in[space] + needed - limit

    def too_many_in(self, space: str) -> int:
        """Contexts of the space that have to go so that there may be one more."""
        quota = self.quotas.get(space)
        return 0 if quota is None or quota.contexts == 0 else self.contexts_in[space] + 1 - quota.contexts

    def fits(self, space: str, needed: int) -> bool:
        """Whether `needed` bytes may be granted now."""
        limit = self.memory_of(space)
        return self.used + needed <= self.limit and (limit == 0 or self.used_in[space] + needed <= limit)

    def memory_of(self, space: str) -> int:
        """The space's own limit in bytes; 0 for none."""
        quota = self.quotas.get(space)
        return 0 if quota is None else quota.memory

    # ---- refusals, with their figures

    def possible(self, space: str, needed: int) -> bool:
        """Whether it would fit into an empty store."""
        own = self.memory_of(space)
        return needed <= self.limit and (own == 0 or needed <= own)

    def impossible(self, space: str, needed: int, held: int) -> StoreFull:
        own = self.memory_of(space)
        if 0 < own < self.limit:
            message = f"the context needs {needed} bytes; the limit of space {space!r} is {own}"
            return StoreFull(message, needed=needed, limit=own, used=self.used_in[space], held=held, space=space)
        message = f"the context needs {needed} bytes; the store's limit is {self.limit}"
        return StoreFull(message, needed=needed, limit=self.limit, used=self.used, held=held)

    def full(self, needed: int, held: int) -> StoreFull:
        return StoreFull(
            f"no room for {needed} bytes: {self.used} of {self.limit} are in use, {held} of them held",
            needed=needed,
            limit=self.limit,
            used=self.used,
            held=held,
        )

    def full_in(self, space: str, needed: int, held: int) -> StoreFull:
        used, limit = self.used_in[space], self.memory_of(space)
        return StoreFull(
            f"no room for {needed} bytes in space {space!r}: {used} of its {limit} are in use, {held} of them held",
            needed=needed,
            limit=limit,
            used=used,
            held=held,
            space=space,
        )

    def many_in(self, space: str) -> StoreFull:
        n, quota = self.contexts_in[space], self.quotas[space]
        return StoreFull(
            f"space {space!r} has {n} contexts of {quota.contexts}, all of them held",
            contexts=n,
            limit=quota.contexts,
            space=space,
        )


def _add(counter: Counter[str], space: str, n: int) -> None:
    """Spaces with nothing leave no trace."""
    counter[space] += n
    if counter[space] == 0:
        del counter[space]


def can_free(bytes_over: int, evictable: list[Entry], everything: Iterable[Entry]) -> bool:
    """Whether evicting can free so much. What each would free alone is often enough, and quickly added up."""
    if bytes_over <= 0:
        return True
    for entry in evictable:
        bytes_over -= entry.image.n_bytes
        if entry.kv is not None and not entry.children:
            bytes_over -= entry.kv.n_bytes
        if bytes_over <= 0:
            return True
    chosen = {e.id for e in evictable}
    going: set[str] = set()  # entries whose blocks would go too
    # A child has more tokens than its parent, so children are decided before their parents.
    for entry in sorted(everything, key=lambda e: len(e.tokens), reverse=True):
        gone = entry.state == "gone" and not entry.leases
        if (gone or entry.id in chosen) and entry.children <= going:
            going.add(entry.id)
            if entry.kv is not None and entry.kv.linked and (gone or entry.children):
                bytes_over -= entry.kv.n_bytes
    return bytes_over <= 0

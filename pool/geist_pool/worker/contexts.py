"""The contexts that this process has mapped.

A context's own blocks and those of its ancestors lie in one object each; the thin image in a third. Of an ancestor only the
blocks are needed, and its image may be gone. Everything is verified once per process, when it is first mapped: an image by its
own checksums, blocks by those in the image of the context that needs them.

Nothing is unmapped on our own judgement. `forget` marks a context; `collect` unmaps what is marked and not in use, and names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from geist_pool.errors import ImageDamaged, ImageMismatch
from geist_pool.protocol import Chain, ContextRef
from geist_pool.store import layout
from geist_pool.store.names import pool_digest
from geist_pool.store.shm import Mapping

Verify = Callable[[memoryview, Sequence[memoryview], int], object]
"""Checks image and blocks from `first_block` on; raises ImageDamaged or ImageMismatch."""


class Attachable(Struct, frozen=True):
    """What a session attaches to: a thin image, and the areas of its whole blocks from position 0."""

    image: memoryview
    kv: tuple[memoryview, ...]


class _Entry:
    """One context: how much of it is mapped, and how many jobs use it."""

    def __init__(self) -> None:
        self.image_mapping: Mapping | None = None
        self.image: memoryview | None = None  # behind the envelope
        self.kv: Mapping | None = None
        self.verified = False  # the image
        self.kv_verified = False
        self.users = 0

    def close(self) -> bool:
        """Unmaps; False if something still borrows the memory. What was unmapped is verified again if it comes back."""
        try:
            if self.image is not None:
                self.image.release()
                self.image, self.verified = None, False
            if self.image_mapping is not None:
                self.image_mapping.close()
                self.image_mapping = None
            if self.kv is not None:
                self.kv.close()
                self.kv, self.kv_verified = None, False
        except BufferError:
            return False
        return True


class ContextCache:
    """Mapped contexts of one pool and one model (`fingerprint`, `numerics`)."""

    def __init__(self, pool: str, *, fingerprint: str, numerics: int, verify: Verify) -> None:
        self._pool = pool_digest(pool)
        self._fingerprint = fingerprint
        self._numerics = numerics
        self._verify = verify
        self._entries: dict[str, _Entry] = {}
        self._forget: set[str] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def map(self, chain: Chain) -> Attachable:
        """Maps and verifies the chain's last context as far as that was not done before.

        Raises ImageDamaged or ImageMismatch; what was newly mapped and did not verify is unmapped again.
        """
        leaf = chain[-1]
        fresh = [ref.id for ref in chain if ref.id not in self._entries]
        try:
            for ref in chain:
                self._map_blocks(ref)
            image = self._map_image(leaf)
            areas = tuple(e.kv.view for e in (self._entries[ref.id] for ref in chain) if e.kv is not None)
            self._verify_new(chain, image, areas)
        except BaseException:
            for context in fresh:
                if context in self._entries:
                    self._drop(context)
            raise
        return Attachable(image, areas)

    def acquire(self, chain: Chain) -> Attachable:
        """As `map`, and keeps everything mapped until `release`."""
        found = self.map(chain)
        for ref in chain:
            self._entries[ref.id].users += 1
        return found

    def release(self, chain: Chain) -> None:
        """Ends one `acquire` of the chain."""
        for ref in chain:
            self._entries[ref.id].users -= 1

    def forget(self, context: str) -> None:
        """Marks a context, mapped or not, for the next `collect` that finds it out of use."""
        self._forget.add(context)

    def collect(self) -> list[str]:
        """Unmaps what is to be forgotten and out of use; the ids of what is not mapped now."""
        done = sorted(c for c in self._forget if c not in self._entries or (not self._entries[c].users and self._drop(c)))
        self._forget.difference_update(done)
        return done

    def close(self) -> None:
        """Unmaps everything; no session may be attached any more."""
        for context in list(self._entries):
            self._drop(context)

    def _map_blocks(self, ref: ContextRef) -> None:
        entry = self._entries.setdefault(ref.id, _Entry())
        if ref.kv is not None and entry.kv is None:
            entry.kv = Mapping(ref.kv, ref.kv_bytes)

    def _map_image(self, ref: ContextRef) -> memoryview:
        entry = self._entries[ref.id]
        if entry.image is None:
            entry.image_mapping = mapping = Mapping(ref.image, ref.image_bytes)
            try:
                entry.image = self._behind_envelope(mapping, ref)
            except BaseException:
                mapping.close()
                entry.image_mapping = None
                raise
        return entry.image

    def _behind_envelope(self, mapping: Mapping, ref: ContextRef) -> memoryview:
        stored = layout.parse(mapping.view, what=ref.image)
        if stored.envelope.id != ref.id or stored.envelope.n_tokens != ref.n_tokens:
            raise ImageDamaged(f"{ref.image} holds context {stored.envelope.id}", context=ref.id)
        if (stored.pool, stored.fingerprint, stored.numerics) != (self._pool, self._fingerprint, self._numerics):
            raise ImageMismatch(f"{ref.image} belongs to another pool, model or version", context=ref.id)
        return mapping.view[stored.image_offset :]

    def _verify_new(self, chain: Chain, image: memoryview, areas: tuple[memoryview, ...]) -> None:
        leaf = self._entries[chain[-1].id]
        new = [ref for ref in chain if ref.n_blocks and not self._entries[ref.id].kv_verified]
        if leaf.verified and not new:
            return
        first = min((ref.first_block for ref in new), default=layout.whole_blocks(chain[-1].n_tokens))
        self._verify(image, areas, first)
        leaf.verified = True
        for ref in new:
            self._entries[ref.id].kv_verified = True

    def _drop(self, context: str) -> bool:
        if not self._entries[context].close():
            return False
        del self._entries[context]
        return True

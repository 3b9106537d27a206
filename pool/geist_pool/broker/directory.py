"""All contexts of the pool, and every byte of shared memory. Pure: no I/O, no clock.

A byte counts from the moment it is granted until its object has lost its name and every worker that may have it mapped has said
that it unmapped it, or is dead. What is granted is never more than the limit. Objects to unlink and Forgets to send leave through
`emit`, in the order in which they have to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from geist_pool.broker.content import ContentIndex, pack_ids
from geist_pool.broker.entries import Entry, Piece
from geist_pool.broker.events import AdoptedContext, SendWorker, Unlink
from geist_pool.errors import StoreFull
from geist_pool.protocol import Chain, ContextRef, Envelope, Forget, Geometry, Grant, Mismatch
from geist_pool.store import layout, names

Emit = Callable[[Unlink | SendWorker], None]


class Directory:
    def __init__(self, pool: str, limit: int, emit: Emit) -> None:
        """limit: bytes of shared memory that contexts may take."""
        self.pool = pool
        self.limit = limit
        self.used = 0
        self.evictions = 0
        self._emit = emit
        self._entries: dict[str, Entry] = {}
        self._content: dict[str, ContentIndex] = {}  # by space
        self._names: dict[tuple[str, str], Entry] = {}  # by space and name

    # ---- finding

    def __contains__(self, context: str) -> bool:
        return context in self._entries

    def entry(self, context: str) -> Entry:
        """By id, in any state. KeyError for none."""
        return self._entries[context]

    def find(self, space: str, reference: str) -> Entry | None:
        """The findable context of this id or name in the space."""
        entry = self._entries.get(reference)
        if entry is not None and entry.state == "sealed" and entry.space == space:
            return entry
        return self._names.get((space, reference))

    def exact(self, space: str, tokens: bytes) -> Entry | None:
        """The context that holds exactly these (packed) tokens."""
        index = self._content.get(space)
        key = None if index is None else index.exact(tokens)
        return None if key is None else self._entries[key]

    def longest_prefix(self, space: str, tokens: bytes) -> tuple[Entry | None, Mismatch | None]:
        """The longest context that these tokens begin with, and where another shares more with them, how far that one goes."""
        index = self._content.get(space)
        if index is None:
            return None, None
        key = index.longest_prefix(tokens)
        found = None if key is None else self._entries[key]
        nearest = index.nearest(tokens)
        if nearest is None or nearest[0] == key or (found is not None and nearest[1] <= found.n_tokens):
            return found, None
        return found, Mismatch(context=nearest[0], position=nearest[1])

    def chain(self, leaf: Entry) -> Chain:
        """References from the root down to `leaf`."""
        refs: list[ContextRef] = []
        entry: Entry | None = leaf
        while entry is not None:
            refs.append(entry.ref())
            entry = entry.parent
        return tuple(reversed(refs))

    def sealed(self, space: str | None = None) -> list[Entry]:
        """Findable contexts, of one space or all, in order of creation."""
        return [e for e in self._entries.values() if e.state == "sealed" and (space is None or e.space == space)]

    def granted(self) -> set[str]:
        """Ids of the contexts that are being made."""
        return {e.id for e in self._entries.values() if e.state == "granted"}

    # ---- making

    def plan(self, envelope: Envelope, base: Entry | None, geometry: Geometry, *, attempt: int = 1) -> Grant:
        """The grant for a context on `base`: names and sizes, nothing reserved. Of the envelope's block figures and parent only
        what follows from `base` and the token count is kept."""
        first = 0 if base is None else layout.whole_blocks(base.n_tokens)
        envelope = Envelope(
            id=envelope.id,
            name=envelope.name,
            space=envelope.space,
            parent=None if base is None else base.id,
            created=envelope.created,
            ttl_s=envelope.ttl_s,
            pin=envelope.pin,
            n_tokens=envelope.n_tokens,
            first_block=first,
            n_blocks=layout.whole_blocks(envelope.n_tokens) - first,
            messages=envelope.messages,
            template_args=envelope.template_args,
        )
        kv_bytes = layout.kv_object_bytes(geometry, envelope.n_blocks)
        ref = ContextRef(
            id=envelope.id,
            image=names.image_name(self.pool, envelope.id, attempt),
            image_bytes=layout.image_object_bytes(geometry, envelope.n_tokens, envelope),
            kv=names.kv_name(self.pool, envelope.id, attempt) if kv_bytes else None,
            kv_bytes=kv_bytes,
            first_block=first,
            n_blocks=envelope.n_blocks,
            n_tokens=envelope.n_tokens,
        )
        return Grant(ref=ref, envelope=envelope)

    def make_room(self, needed: int) -> bool:
        """Evicts until `needed` bytes fit. True: they fit now; False: they will, once workers have unmapped what is gone.

        Raises StoreFull, having evicted nothing, if they cannot fit.
        """
        if needed > self.limit:
            raise StoreFull(
                f"the context needs {needed} bytes; the store's limit is {self.limit}",
                needed=needed,
                limit=self.limit,
                used=self.used,
                held=self.held_bytes(),
            )
        if self.used + needed <= self.limit:
            return True
        coming = self.unmapping_bytes()
        if self.used - coming + needed > self.limit:
            if self.used - coming - self._freeable() + needed > self.limit:
                held = self.held_bytes()
                raise StoreFull(
                    f"no room for {needed} bytes: {self.used} of {self.limit} are in use, {held} of them held",
                    needed=needed,
                    limit=self.limit,
                    used=self.used,
                    held=held,
                )
            for entry in sorted((e for e in self._entries.values() if e.evictable), key=lambda e: e.last_used):
                if self.used - self.unmapping_bytes() + needed <= self.limit:
                    break
                self._evict(entry)
        return self.used + needed <= self.limit

    def grant(self, grant: Grant, tokens: bytes, base: Entry | None) -> Entry:
        """Reserves what `plan` gave; `make_room` must have said True."""
        assert self.used + grant.ref.image_bytes + grant.ref.kv_bytes <= self.limit, "granted without room"
        entry = Entry(grant.ref, grant.envelope, tokens, base, "granted")
        self._insert(entry)
        return entry

    def regrant(self, entry: Entry, geometry: Geometry) -> Grant:
        """The grant for another attempt after the worker that had the last one died; its objects are unlinked."""
        assert entry.state == "granted"
        entry.attempt += 1
        grant = self.plan(entry.envelope, entry.parent, geometry, attempt=entry.attempt)
        for piece in entry.pieces:
            self._unlink(piece)
        for piece, name in zip(entry.pieces, (grant.ref.image, grant.ref.kv), strict=False):
            assert name is not None and not piece.mappers
            piece.name, piece.linked = name, True
            self._count(piece)
        return grant

    def seal(self, entry: Entry, now: float) -> None:
        """The worker has finished it: findable from now on."""
        assert entry.state == "granted"
        entry.state = "sealed"
        entry.last_used = now
        self._content.setdefault(entry.space, ContentIndex()).add(entry.tokens, entry.id)

    def abandon(self, entry: Entry) -> None:
        """The grant comes to nothing; its objects go."""
        assert entry.state == "granted"
        entry.state = "gone"
        self._settle(entry)

    def bind(self, name: str, entry: Entry) -> None:
        """`name` leads to this context from now on, and no longer to another."""
        assert entry.state == "sealed"
        old = self._names.get((entry.space, name))
        if old is not None:
            old.names.remove(name)
        self._names[entry.space, name] = entry
        entry.names.append(name)

    def adopt(self, found: AdoptedContext) -> Entry | None:
        """Takes in a context that was found whole; None (and nothing changed) if its parent is not here or its tokens are."""
        parent_id = found.envelope.parent
        parent = None if parent_id is None else self._entries.get(parent_id)
        tokens = pack_ids(found.tokens)
        if found.envelope.id in self._entries or (parent is None and parent_id is not None):
            return None
        if self.exact(found.envelope.space, tokens) is not None:
            return None
        entry = Entry(found.ref, found.envelope, tokens, parent, "granted")
        parsed = names.parse_name(found.ref.image)
        entry.attempt = 1 if parsed is None else parsed.attempt
        self._insert(entry)
        self.seal(entry, found.envelope.created)
        if found.envelope.name is not None:
            bound = self._names.get((entry.space, found.envelope.name))
            if bound is None or bound.envelope.created <= entry.envelope.created:
                self.bind(found.envelope.name, entry)
        return entry

    def fit(self) -> int:
        """Evicts until the limit holds (after adoption, which may bring more than it). Pinned ones go last. How many went."""
        before = self.evictions
        for entry in sorted(self.sealed(), key=lambda e: (e.pinned, e.last_used)):
            if self.used - self.unmapping_bytes() <= self.limit:
                break
            self._evict(entry)
        return self.evictions - before

    # ---- using

    def lease(self, entry: Entry, job: str, now: float) -> None:
        entry.leases.add(job)
        entry.last_used = max(entry.last_used, now)

    def release(self, entry: Entry, job: str) -> None:
        entry.leases.discard(job)
        self._settle(entry)

    def keep(self, entry: Entry, *, pin: bool, expires: float | None, now: float) -> None:
        """Another request wants this context: what it asks for is added, what others asked for stays."""
        entry.last_used = max(entry.last_used, now)
        entry.pinned = entry.pinned or pin
        if entry.expires is not None:
            entry.expires = None if expires is None else max(entry.expires, expires)

    def drop(self, entry: Entry) -> None:
        """No longer findable; who holds it finishes."""
        assert entry.state == "sealed"
        index = self._content[entry.space]
        index.remove(entry.tokens)
        if not len(index):
            del self._content[entry.space]
        for name in entry.names:
            del self._names[entry.space, name]
        entry.names.clear()
        entry.state = "gone"
        self._settle(entry)

    def expire(self, now: float) -> list[str]:
        """Drops what has outlived its ttl; their ids."""
        late = [e for e in self.sealed() if e.expires is not None and e.expires <= now]
        for entry in late:
            self.drop(entry)
        return [e.id for e in late]

    def clear(self, *, keep_sealed: bool) -> None:
        """The pool ends: unlinks everything, or everything but findable contexts and what they stand on."""
        for entry in list(self._entries.values()):
            entry.leases.clear()
            if entry.state == "granted":
                self.abandon(entry)
            elif entry.state == "gone":
                self._settle(entry)
            elif not keep_sealed:
                self.drop(entry)

    # ---- who has what mapped

    def mention(self, worker: str, leaf: Entry) -> None:
        """A worker is told of this context: it may map its image and the blocks of the whole chain from now on."""
        self._mark(worker, leaf, leaf.image)
        entry: Entry | None = leaf
        while entry is not None:
            if entry.kv is not None:
                self._mark(worker, entry, entry.kv)
            entry = entry.parent

    def mapped(self, worker: str, context: str) -> None:
        entry = self._entries.get(context)
        if entry is not None and worker in entry.image.mappers:
            entry.mapped.add(worker)

    def forgotten(self, worker: str, context: str) -> bool:
        """False for an answer to nothing."""
        entry = self._entries.get(context)
        if entry is None or entry.forgotten.get(worker, 0) >= entry.forgets.get(worker, 0):
            return False
        answered = entry.forgotten[worker] = entry.forgotten.get(worker, 0) + 1
        for piece in entry.pieces:
            if worker in piece.mappers and piece.mappers[worker] < answered:
                del piece.mappers[worker]
                self._count(piece)
        if entry.state == "gone" and not entry.leases:
            self._forget(entry)
        self._bury(entry)
        return True

    def worker_lost(self, worker: str) -> None:
        """A dead process has nothing mapped."""
        for entry in list(self._entries.values()):
            entry.mapped.discard(worker)
            entry.forgets.pop(worker, None)
            entry.forgotten.pop(worker, None)
            for piece in entry.pieces:
                if piece.mappers.pop(worker, None) is not None:
                    self._count(piece)
            self._bury(entry)

    # ---- figures, in bytes

    def held_bytes(self) -> int:
        """Of contexts that cannot go: pinned, leased, or being made."""
        return sum(e.own_bytes for e in self._entries.values() if e.leases or e.state == "granted" or e.pinned)

    def unmapping_bytes(self) -> int:
        """Without a name, but not yet unmapped everywhere."""
        gone = (p for e in self._entries.values() for p in e.pieces if e.state == "gone")
        return sum(p.n_bytes for p in gone if p.counted and not p.linked)

    def orphaned_bytes(self) -> int:
        """Of blocks that are kept only because descendants stand on them."""
        gone = (e for e in self._entries.values() if e.state == "gone" and not e.leases)
        return sum(e.kv.n_bytes for e in gone if e.kv is not None and e.kv.linked)

    def _freeable(self) -> int:
        """What evicting everything evictable would free."""
        freed = 0
        going: set[str] = set()  # entries whose blocks would go too
        # A child has more tokens than its parent, so children are decided before their parents.
        for entry in sorted(self._entries.values(), key=lambda e: len(e.tokens), reverse=True):
            if not (entry.evictable or (entry.state == "gone" and not entry.leases)):
                continue
            if entry.image.linked:
                freed += entry.image.n_bytes
            if entry.children <= going:
                going.add(entry.id)
                if entry.kv is not None and entry.kv.linked:
                    freed += entry.kv.n_bytes
        return freed

    # ---- within

    def _insert(self, entry: Entry) -> None:
        assert entry.id not in self._entries
        self._entries[entry.id] = entry
        if entry.parent is not None:
            entry.parent.children.add(entry.id)
        for piece in entry.pieces:
            self._count(piece)

    def _evict(self, entry: Entry) -> None:
        self.evictions += 1
        self.drop(entry)

    def _settle(self, start: Entry) -> None:
        """Lets go of what an entry that is gone no longer needs to keep, and then of what only it kept alive."""
        entry: Entry | None = start
        while entry is not None and entry.state == "gone" and not entry.leases and entry.attached:
            self._unlink(entry.image)
            if not entry.children:
                entry.attached = False
                if entry.kv is not None:
                    self._unlink(entry.kv)
            self._forget(entry)
            if entry.attached:
                return
            if entry.parent is not None:
                entry.parent.children.discard(entry.id)
            self._bury(entry)
            entry = entry.parent

    def _forget(self, entry: Entry) -> None:
        """Asks every worker that may have a nameless object of this entry mapped. One question at a time: a worker may answer two
        with one word, and whoever was told of the object after the question is asked again after the answer."""
        workers: set[str] = set()
        for piece in entry.pieces:
            if not piece.linked:
                workers.update(piece.mappers)
        for worker in sorted(w for w in workers if entry.forgets.get(w, 0) == entry.forgotten.get(w, 0)):
            entry.forgets[worker] = entry.forgets.get(worker, 0) + 1
            entry.mapped.discard(worker)
            self._emit(SendWorker(worker, Forget(entry.id)))

    def _bury(self, entry: Entry) -> None:
        if entry.state == "gone" and not entry.children and not any(p.alive for p in entry.pieces):
            self._entries.pop(entry.id, None)

    def _mark(self, worker: str, entry: Entry, piece: Piece) -> None:
        piece.mappers[worker] = entry.forgets.get(worker, 0)
        self._count(piece)

    def _unlink(self, piece: Piece) -> None:
        if piece.linked:
            piece.linked = False
            self._emit(Unlink((piece.name,)))
            self._count(piece)

    def _count(self, piece: Piece) -> None:
        if piece.alive != piece.counted:
            piece.counted = piece.alive
            self.used += piece.n_bytes if piece.alive else -piece.n_bytes

    # ---- checking

    def validate(self, jobs: Iterable[str] | None = None) -> None:
        """AssertionError on any contradiction. `jobs`: keys of the jobs that live, the only ones that may hold a lease."""
        entries = self._entries
        pieces = [p for e in entries.values() for p in e.pieces]
        assert self.used == sum(p.n_bytes for p in pieces if p.alive), "the sum of bytes is wrong"
        assert all(p.counted == p.alive for p in pieces)
        assert self.used <= self.limit, f"{self.used} bytes are more than {self.limit}"
        live = None if jobs is None else set(jobs)
        for key, entry in entries.items():
            assert key == entry.id
            assert live is None or entry.leases <= live, f"context {key} is leased to jobs that are no more"
            if entry.state == "gone":
                assert not entry.names
                assert entry.children or any(p.alive for p in entry.pieces), f"context {key} is kept for nothing"
                assert entry.leases or not entry.image.linked, f"context {key} keeps its image for nothing"
                for piece in entry.pieces:
                    for worker in piece.mappers:
                        asked = entry.forgets.get(worker, 0) > entry.forgotten.get(worker, 0)
                        assert piece.linked or asked, f"{worker} was not told to forget {key}"
            else:
                assert entry.attached and all(p.linked for p in entry.pieces)
            assert entry.attached or not entry.children
            for worker, n in entry.forgets.items():
                assert entry.forgotten.get(worker, 0) <= n
            parent = entry.parent
            if parent is not None and entry.attached:
                assert entries.get(parent.id) is parent and key in parent.children
                assert parent.kv is None or parent.kv.linked, f"context {key} has lost its ancestor's blocks"
            assert all(child in entries and entries[child].parent is entry for child in entry.children)
        sealed = {(e.space, e.tokens): e.id for e in entries.values() if e.state == "sealed"}
        indexed = {(space, tokens): key for space, index in self._content.items() for tokens, key in index.items()}
        assert sealed == indexed, "the index by content is wrong"
        named = {(e.space, name): e.id for e in entries.values() for name in e.names}
        assert named == {key: e.id for key, e in self._names.items()}, "the index by name is wrong"

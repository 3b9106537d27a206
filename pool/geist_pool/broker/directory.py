"""All contexts of the pool, and every byte of shared memory. Pure: no I/O, no clock.

A byte counts from the moment it is granted until its object has lost its name and every worker that may have it mapped has said
that it unmapped it, or is dead. What is granted is never more than the limit. Objects to unlink and Forgets to send leave through
`emit`, in the order in which they have to be done.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from geist_pool.broker import directory_checks, grants
from geist_pool.broker.content import ContentIndex, pack_ids
from geist_pool.broker.entries import Entry, More, Piece
from geist_pool.broker.events import AdoptedContext, SendWorker, Unlink
from geist_pool.broker.room import Ledger, Quota, can_free
from geist_pool.broker.text_types import TemplateArgs
from geist_pool.protocol import Chain, ContextRef, Envelope, Forget, Geometry, Grant, Message, Mismatch
from geist_pool.store import names

Emit = Callable[[Unlink | SendWorker], None]
Cause = Literal["room", "ttl", "dropped", "damaged"]


class Directory:
    def __init__(self, pool: str, limit: int, emit: Emit, quotas: Mapping[str, Quota] | None = None) -> None:
        """limit: bytes of shared memory that contexts may take. quotas: by space."""
        self.pool = pool
        self.ledger = Ledger(limit, quotas or {})
        self.removed: Counter[str] = Counter()  # contexts by cause: room, ttl, dropped, damaged
        self.rebound = False  # names, pins or times to live are not as they were when that was last written down
        self._emit = emit
        self._entries: dict[str, Entry] = {}
        self._content: dict[str, ContentIndex] = {}  # by space
        self._names: dict[tuple[str, str], Entry] = {}  # by space and name
        self._sealed: dict[str, Entry] = {}  # findable ones, the longest unused first
        self._granted: set[str] = set()
        self._expiring: list[tuple[float, str]] = []  # a heap; what is no longer true of an entry is passed over

    @property
    def limit(self) -> int:
        return self.ledger.limit

    @property
    def used(self) -> int:
        """Bytes granted, named or mapped."""
        return self.ledger.used

    @property
    def evictions(self) -> int:
        return self.removed["room"]

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
        """References from the root down to `leaf`, which is not being made any more."""
        if leaf.chain is None:
            leaf.chain = (leaf.ref(),) if leaf.parent is None else (*self.chain(leaf.parent), leaf.ref())
        return leaf.chain

    def sealed(self, space: str | None = None) -> list[Entry]:
        """Findable contexts, of one space or all, in order of creation."""
        found = [e for e in self._sealed.values() if space is None or e.space == space]
        return sorted(found, key=lambda e: (e.envelope.created, e.id))

    @property
    def n_sealed(self) -> int:
        return len(self._sealed)

    def entries(self) -> Iterable[Entry]:
        """Of any state."""
        return self._entries.values()

    def granted(self) -> set[str]:
        """Ids of the contexts that are being made."""
        return self._granted

    # ---- making

    def plan(
        self, envelope: Envelope, base: Entry | None, geometry: Geometry, *, attempt: int = 1, more: More | None = None
    ) -> Grant:
        """The grant for a context on `base`: names and sizes, nothing reserved. See `grants.plan`."""
        above = () if base is None else self.chain(base)
        return grants.plan(self.pool, envelope, base, above, geometry, attempt=attempt, more=more)

    def make_room(self, needed: int, space: str) -> bool:
        """Evicts until one more context of `needed` bytes fits. True: it fits now; False: it will, once workers have unmapped
        what is gone. Over the limits of its space only contexts of that space go.

        Raises StoreFull, having evicted nothing, if it cannot fit.
        """
        ledger = self.ledger
        if not ledger.possible(space, needed):
            raise ledger.impossible(space, needed, self.held_bytes())
        too_many = ledger.too_many_in(space)
        if too_many <= 0 and ledger.missing_in(space, needed) <= 0 and ledger.missing(needed) <= 0:
            return ledger.fits(space, needed)
        of_space = [e for e in self._sealed.values() if e.evictable and e.space == space]
        if too_many > len(of_space):
            raise ledger.many_in(space)
        if not can_free(ledger.missing_in(space, needed), of_space, [e for e in self._entries.values() if e.space == space]):
            raise ledger.full_in(space, needed, self.held_bytes(space))
        everything = [e for e in self._sealed.values() if e.evictable]
        if not can_free(ledger.missing(needed), everything, self._entries.values()):
            raise ledger.full(needed, self.held_bytes())
        for entry in of_space[: max(0, too_many)]:
            self.drop(entry, "room")
        for entry in of_space:
            if ledger.missing_in(space, needed) <= 0:
                break
            if entry.state == "sealed":
                self.drop(entry, "room")
        for entry in everything:
            if ledger.missing(needed) <= 0:
                break
            if entry.state == "sealed":
                self.drop(entry, "room")
        return ledger.fits(space, needed)

    def grant(self, grant: Grant, tokens: bytes, base: Entry | None, more: More | None = None) -> Entry:
        """Reserves what `plan` gave; `make_room` must have said True. tokens: as far as they are known."""
        envelope = grant.envelope
        assert self.ledger.fits(envelope.space, grant.ref.image_bytes + grant.ref.kv_bytes), "granted without room"
        entry = Entry(grant.ref, envelope, tokens, base, "granted")
        entry.more = more
        self._insert(entry)
        return entry

    def regrant(self, entry: Entry, geometry: Geometry) -> Grant:
        """The grant for another attempt after the worker that had the last one died; its objects are unlinked."""
        assert entry.state == "granted"
        entry.attempt += 1
        least = entry.envelope.n_tokens - (0 if entry.more is None else entry.more.tokens)
        envelope = msgspec.structs.replace(entry.envelope, n_tokens=least)
        grant = self.plan(envelope, entry.parent, geometry, attempt=entry.attempt, more=entry.more)
        for piece in entry.pieces:
            self._unlink(entry, piece)
        for piece, name in zip(entry.pieces, (grant.ref.image, grant.ref.kv), strict=False):
            assert name is not None and not piece.mappers
            piece.name, piece.linked = name, True
            self._count(entry, piece)
        return grant

    def measure(self, entry: Entry, made: ContextRef, envelope: Envelope, tokens: bytes) -> None:
        """What was granted with a ceiling has its true length: what was reserved beyond that is free again."""
        assert entry.state == "granted"
        entry.envelope, entry.tokens = envelope, tokens
        self.ledger.resize(entry.space, entry.image, made.image_bytes)
        if entry.kv is not None and made.kv is None:
            entry.kv.linked = False  # it was never created
            self._count(entry, entry.kv)
            entry.kv = None
        elif entry.kv is not None:
            self.ledger.resize(entry.space, entry.kv, made.kv_bytes)

    def seal(self, entry: Entry, now: float) -> None:
        """The worker has finished it: findable from now on."""
        assert entry.state == "granted"
        entry.state = "sealed"
        self._granted.remove(entry.id)
        self._content.setdefault(entry.space, ContentIndex()).add(entry.tokens, entry.id)
        self._touch(entry, now)
        self._will_expire(entry)
        if entry.envelope.name is not None:
            self.rebound = True  # who wanted it called so may be gone by now: that it is not called so must be known, too

    def abandon(self, entry: Entry) -> None:
        """The grant comes to nothing; its objects go."""
        assert entry.state == "granted"
        entry.state = "gone"
        self._granted.remove(entry.id)
        self.ledger.context(entry.space, -1)
        self._settle(entry)

    def bind(self, name: str, entry: Entry) -> None:
        """`name` leads to this context from now on, and no longer to another."""
        assert entry.state == "sealed"
        old = self._names.get((entry.space, name))
        if old is not None:
            old.names.remove(name)
        self._names[entry.space, name] = entry
        entry.names.append(name)
        self.rebound = True

    def adopt(self, found: AdoptedContext) -> Entry | None:
        """Takes in a context that was found whole, and with it the blocks of ancestors that are not there themselves; None (and
        nothing changed) if its id or its tokens are here already. Names are not bound: see `bindings.restore`."""
        envelope = found.envelope
        if envelope.id in self._entries or self.exact(envelope.space, tokens := pack_ids(found.tokens)) is not None:
            return None
        parent: Entry | None = None
        for i, ref in enumerate(envelope.chain):
            known = self._entries.get(ref.id)
            parent = self._adopt_blocks(found, ref, parent, envelope.chain[:i]) if known is None else known
        entry = Entry(found.ref, envelope, tokens, parent, "granted")
        parsed = names.parse_name(found.ref.image)
        entry.attempt = 1 if parsed is None else parsed.attempt
        self._insert(entry)
        self.seal(entry, envelope.created)
        return entry

    def _adopt_blocks(self, found: AdoptedContext, ref: ContextRef, parent: Entry | None, above: Chain) -> Entry:
        """An ancestor whose image is gone: it is not findable, its blocks stay until the last descendant goes."""
        envelope = Envelope(
            id=ref.id,
            name=None,
            space=found.envelope.space,
            parent=None if parent is None else parent.id,
            created=found.envelope.created,
            ttl_s=None,
            pin=False,
            n_tokens=ref.n_tokens,
            first_block=ref.first_block,
            n_blocks=ref.n_blocks,
            chain=above,
        )
        entry = Entry(ref, envelope, pack_ids(found.tokens[: ref.n_tokens]), parent, "granted")
        entry.image.linked = False
        self._insert(entry)
        entry.state = "gone"
        self._granted.remove(entry.id)
        self.ledger.context(entry.space, -1)
        return entry

    def fit(self) -> int:
        """Evicts until the limits hold (adoption may bring more than they allow), pinned ones last. How many went."""
        before, ledger = self.evictions, self.ledger
        self._sealed = dict(sorted(self._sealed.items(), key=lambda item: item[1].last_used))
        for entry in sorted(self._sealed.values(), key=lambda e: (e.pinned, e.last_used)):
            too_many = ledger.too_many_in(entry.space) > 1  # one more is not asked for
            if too_many or ledger.missing_in(entry.space, 0) > 0 or ledger.missing(0) > 0:
                self.drop(entry, "room")
        return self.evictions - before

    # ---- using

    def lease(self, entry: Entry, job: str, now: float) -> None:
        entry.leases.add(job)
        self._touch(entry, now)

    def release(self, entry: Entry, job: str) -> None:
        entry.leases.discard(job)
        self._settle(entry)

    def keep(self, entry: Entry, *, pin: bool, expires: float | None, now: float) -> None:
        """Another request wants this context: what it asks for is added, what others asked for stays."""
        self._touch(entry, now)
        expires = None if entry.expires is None or expires is None else max(entry.expires, expires)
        self.keep_as(entry, pinned=entry.pinned or pin, expires=expires)

    def keep_as(self, entry: Entry, *, pinned: bool, expires: float | None) -> None:
        """Exactly so."""
        if (entry.pinned, entry.expires) != (pinned, expires):
            entry.pinned, entry.expires = pinned, expires
            self.rebound = True
            self._will_expire(entry)

    def learn(self, entry: Entry, messages: tuple[Message, ...] | None, template_args: TemplateArgs) -> None:
        """The messages that the context's tokens are the rendering of, where none were known: messages can continue it then."""
        if messages is not None and entry.messages is None:
            entry.envelope = msgspec.structs.replace(entry.envelope, messages=messages, template_args=template_args)

    def drop(self, entry: Entry, cause: Cause) -> None:
        """No longer findable; who holds it finishes."""
        assert entry.state == "sealed"
        self.removed[cause] += 1
        self.rebound = self.rebound or bool(entry.names or entry.leases)
        index = self._content[entry.space]
        index.remove(entry.tokens)
        if not len(index):
            del self._content[entry.space]
        for name in entry.names:
            del self._names[entry.space, name]
        entry.names.clear()
        entry.state = "gone"
        del self._sealed[entry.id]
        self.ledger.context(entry.space, -1)
        self._settle(entry)

    def expire(self, now: float) -> list[Entry]:
        """Drops what has outlived its ttl."""
        late: list[Entry] = []
        while self._expiring and self._expiring[0][0] <= now:
            entry = self._sealed.get(heapq.heappop(self._expiring)[1])
            if entry is not None and entry.expires is not None and entry.expires <= now:
                self.drop(entry, "ttl")
                late.append(entry)
        return late

    def clear(self, *, keep_sealed: bool) -> None:
        """The pool ends: unlinks everything, or everything but findable contexts and what they stand on."""
        for entry in list(self._entries.values()):
            entry.leases.clear()
            if entry.state == "granted":
                self.abandon(entry)
            elif entry.state == "gone":
                self._settle(entry)
            elif not keep_sealed:
                self.drop(entry, "dropped")

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
                self._count(entry, piece)
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
                    self._count(entry, piece)
            self._bury(entry)

    # ---- figures, in bytes

    def held_bytes(self, space: str | None = None) -> int:
        """Of contexts that cannot go: pinned, leased, or being made."""
        entries = (e for e in self._entries.values() if space is None or e.space == space)
        return sum(e.own_bytes for e in entries if e.leases or e.state == "granted" or e.pinned)

    def unmapping_bytes(self) -> int:
        """Without a name, but not yet unmapped everywhere."""
        return self.ledger.unmapping

    def orphaned_bytes(self) -> int:
        """Of blocks that are kept only because descendants stand on them."""
        return self.bytes_by_kind()["orphaned"]

    def bytes_by_kind(self) -> dict[str, int]:
        """What `used` is made of: images and own blocks of sealed contexts (and of dropped ones in use), orphaned blocks, what is
        still mapped without a name, what is reserved for contexts being made."""
        kinds = dict.fromkeys(("image", "kv", "orphaned", "unmapping", "reserved"), 0)
        for entry in self._entries.values():
            for piece in entry.pieces:
                if not piece.counted:
                    continue
                if piece.nameless:
                    kind = "unmapping"
                elif entry.state == "granted":
                    kind = "reserved"
                elif piece is entry.image:
                    kind = "image"
                else:
                    kind = "orphaned" if entry.state == "gone" and not entry.leases else "kv"
                kinds[kind] += piece.n_bytes
        return kinds

    # ---- within

    def _insert(self, entry: Entry) -> None:
        assert entry.id not in self._entries and entry.state == "granted"
        self._entries[entry.id] = entry
        self._granted.add(entry.id)
        self.ledger.context(entry.space, 1)
        if entry.parent is not None:
            entry.parent.children.add(entry.id)
        for piece in entry.pieces:
            self._count(entry, piece)

    def _touch(self, entry: Entry, now: float) -> None:
        entry.last_used = max(entry.last_used, now)
        if entry.state == "sealed":
            self._sealed.pop(entry.id, None)
            self._sealed[entry.id] = entry

    def _will_expire(self, entry: Entry) -> None:
        if entry.expires is not None and entry.state == "sealed":
            heapq.heappush(self._expiring, (entry.expires, entry.id))

    def _settle(self, start: Entry) -> None:
        """Lets go of what an entry that is gone no longer needs to keep, and then of what only it kept alive."""
        entry: Entry | None = start
        while entry is not None and entry.state == "gone" and not entry.leases and entry.attached:
            self._unlink(entry, entry.image)
            if not entry.children:
                entry.attached = False
                if entry.kv is not None:
                    self._unlink(entry, entry.kv)
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
        self._count(entry, piece)

    def _unlink(self, entry: Entry, piece: Piece) -> None:
        if piece.linked:
            piece.linked = False
            self._emit(Unlink((piece.name,)))
            self._count(entry, piece)

    def _count(self, entry: Entry, piece: Piece) -> None:
        self.ledger.count(entry.space, piece)

    def validate(self, jobs: Iterable[str] | None = None) -> None:
        """AssertionError on any contradiction. `jobs`: keys of the jobs that live, the only ones that may hold a lease."""
        directory_checks.check_entries(self._entries, None if jobs is None else set(jobs))
        directory_checks.check_ledger(self.ledger, self._entries)
        directory_checks.check_indexes(self._entries, self._content, self._names)
        assert self._sealed == {k: e for k, e in self._entries.items() if e.state == "sealed"}
        assert self._granted == {k for k, e in self._entries.items() if e.state == "granted"}
        expiring = set(self._expiring)
        assert all(e.expires is None or (e.expires, e.id) in expiring for e in self._sealed.values()), "a ttl is not watched"

"""What must always hold among the contexts of a directory. Pure; AssertionError on any contradiction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from geist_pool.broker.content import ContentIndex
from geist_pool.broker.entries import Entry
from geist_pool.broker.room import Ledger


def check_entries(entries: Mapping[str, Entry], live: set[str] | None) -> None:
    """`live`: keys of the jobs that live, the only ones that may hold a lease."""
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
        assert entry.state == "granted" or entry.reference is None or entry.reference.image == entry.image.name
        for worker, n in entry.forgets.items():
            assert entry.forgotten.get(worker, 0) <= n
        parent = entry.parent
        if parent is not None and entry.attached:
            assert entries.get(parent.id) is parent and key in parent.children
            assert parent.kv is None or parent.kv.linked, f"context {key} has lost its ancestor's blocks"
        assert all(child in entries and entries[child].parent is entry for child in entry.children)


def check_ledger(ledger: Ledger, entries: Mapping[str, Entry]) -> None:
    used: Counter[str] = Counter()
    unmapping: Counter[str] = Counter()
    contexts: Counter[str] = Counter()
    for entry in entries.values():
        if entry.state != "gone":
            contexts[entry.space] += 1
        for piece in entry.pieces:
            nameless = piece.alive and not piece.linked
            assert piece.counted == piece.alive and piece.nameless == nameless
            if piece.alive:
                used[entry.space] += piece.n_bytes
            if nameless:
                unmapping[entry.space] += piece.n_bytes
    assert used == ledger.used_in and used.total() == ledger.used, "the sum of bytes is wrong"
    assert unmapping == ledger.unmapping_in and unmapping.total() == ledger.unmapping
    assert contexts == ledger.contexts_in
    assert ledger.used <= ledger.limit, f"{ledger.used} bytes are more than {ledger.limit}"
    for space, quota in ledger.quotas.items():
        assert quota.memory == 0 or used[space] <= quota.memory, f"space {space} has more than its bytes"
        assert quota.contexts == 0 or contexts[space] <= quota.contexts, f"space {space} has more than its contexts"


def check_indexes(
    entries: Mapping[str, Entry], content: Mapping[str, ContentIndex], names: Mapping[tuple[str, str], Entry]
) -> None:
    sealed = {(e.space, e.tokens): e.id for e in entries.values() if e.state == "sealed"}
    indexed = {(space, tokens): key for space, index in content.items() for tokens, key in index.items()}
    assert sealed == indexed, "the index by content is wrong"
    named = {(e.space, name): e.id for e in entries.values() for name in e.names}
    assert named == {key: e.id for key, e in names.items()}, "the index by name is wrong"

"""What outlives the broker of names, pins and times to live. Pure.

A context's envelope says what it was to be called when it was granted, and is never changed. What was bound, pinned or dropped
after that is written down a moment later, outside the image.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from geist_pool.broker.books import Books
from geist_pool.broker.directory import Directory
from geist_pool.broker.entries import Entry
from geist_pool.broker.events import Binding, Bindings, KeepBindings

PAUSE_S: Final = 0.25  # between two times that they are written down


def keep(books: Books, *, at_once: bool = False) -> None:
    """Has them written down if something has changed."""
    directory = books.directory
    if directory.rebound and (at_once or books.now - books.bindings_kept >= PAUSE_S):
        directory.rebound = False
        books.bindings_kept = books.now
        books.out.append(KeepBindings(bindings_of(directory)))


def bindings_of(directory: Directory) -> Bindings:
    told = [e for e in directory.sealed() if e.names or e.envelope.name is not None or _has_changed(e)]
    return Bindings(
        contexts=tuple(Binding(e.id, tuple(e.names), e.pinned, e.expires) for e in told),
        dropped=tuple(e.id for e in directory.entries() if e.state == "gone" and e.image.linked),
    )


def restore(directory: Directory, adopted: Iterable[Entry], bindings: Bindings | None) -> None:
    """Names, pins and times to live of adopted contexts. A context that `bindings` do not know was sealed after they were
    written, so its envelope speaks for it, and its name is the newer one."""
    known = {} if bindings is None else {b.context: b for b in bindings.contexts}
    dropped = () if bindings is None else bindings.dropped
    entries = list(adopted)
    for entry in entries:
        if entry.id in known:
            binding = known[entry.id]
            directory.keep_as(entry, pinned=binding.pinned, expires=binding.expires)
            for name in binding.names:
                directory.bind(name, entry)
    for entry in sorted(entries, key=lambda e: (e.envelope.created, e.id)):
        if entry.id not in known and entry.id not in dropped and entry.envelope.name is not None:
            directory.bind(entry.envelope.name, entry)
    for entry in entries:
        if entry.id in dropped:
            directory.drop(entry, "dropped")


def _has_changed(entry: Entry) -> bool:
    envelope = entry.envelope
    expires = None if envelope.ttl_s is None else envelope.created + envelope.ttl_s
    return (entry.pinned, entry.expires) != (envelope.pin, expires)

"""The only opener of shared memory.

An object is created exclusively under a granted name, reserved in full before a byte is written (a full /dev/shm is an error
then, and not a SIGBUS later), filled, sealed, and from then on mapped read-only. Nothing in it is ever changed again: no lock,
counter or free list lives here, so a process that dies can neither hold nor corrupt anything. Unlinking is the broker's business,
save for what a writer created and did not seal.

Memory of an unlinked object comes back when the last process has unmapped it.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import posix_ipc
from msgspec import Struct

from geist_pool.errors import EngineError, GeistPoolError, ImageDamaged, ImageMismatch, Internal, StoreFull
from geist_pool.protocol import ContextRef, Envelope, Geometry
from geist_pool.store import layout, unfinished
from geist_pool.store.names import ObjectName, check_name, parse_name, pool_digest, pool_tag

SHM: Final = Path("/dev/shm")  # where Linux keeps POSIX shared memory; posix_ipc cannot list it
MODE: Final = 0o600
_MADV_POPULATE_WRITE: Final = 23  # of <linux/mman.h>; Python does not name it
_FULL: Final = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


def _reserve(fd: int, n: int) -> None:
    os.posix_fallocate(fd, 0, n)


def _populate(mapping: mmap.mmap) -> None:
    """Enters all pages at once instead of one fault each: 30 MB are published in 22.9 ms instead of 25.7 (medians)."""
    with suppress(OSError):  # EINVAL before Linux 5.14: then a fault each it is
        mapping.madvise(_MADV_POPULATE_WRITE)


# ---- one object


class Writer:
    """Creates one object, exclusively and fully reserved; unlinks it on leaving unless `keep` was called.

    `view` is its memory, writable, all zeros. Raises StoreFull where the memory cannot be had (nothing is left then), Internal
    where an object of that name exists (which is left alone).
    """

    def __init__(self, name: str, n_bytes: int) -> None:
        check_name(name)  # also keeps NUL away from posix_ipc, which does not survive it
        if n_bytes < 1:
            raise ValueError(f"an object of {n_bytes} bytes")
        self.name = name
        self.n_bytes = n_bytes
        self._kept = False
        try:
            shared = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=MODE, size=0)
        except posix_ipc.ExistentialError:
            raise Internal(f"{name} exists already", object=name) from None
        except OSError as error:
            raise _failed(name, n_bytes, error) from error
        self._token = unfinished.begin(lambda: unlink(name))
        try:
            _reserve(shared.fd, n_bytes)
            self._map = mmap.mmap(shared.fd, n_bytes)
            _populate(self._map)
        except BaseException as error:
            unlink(name)
            unfinished.end(self._token)
            if isinstance(error, OSError):
                raise _failed(name, n_bytes, error) from error
            raise
        finally:
            shared.close_fd()
        self.view = memoryview(self._map)

    def keep(self) -> None:
        """The object stays when the writer closes."""
        self._kept = True
        unfinished.end(self._token)

    def close(self) -> None:
        """Unmaps, and unlinks unless kept. Allowed twice. BufferError if a borrowed view lives on; the name is gone even so."""
        if not self._kept:
            unlink(self.name)
            self.keep()
        _release(self.view, self._map)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Mapping:
    """An object mapped read-only. `view` is its memory.

    Raises ImageDamaged if there is no such object, or one of another size than `n_bytes`, or not this user's with mode 0600;
    EngineError where this process may have no more descriptors or mappings.
    """

    def __init__(self, name: str, n_bytes: int | None = None) -> None:
        check_name(name)
        self.name = name
        try:
            shared = posix_ipc.SharedMemory(name, read_only=True)
        except posix_ipc.ExistentialError:
            raise ImageDamaged(f"there is no {name}", object=name, missing=True) from None
        except posix_ipc.PermissionsError as error:
            raise ImageDamaged(f"{name} cannot be opened: {error}", object=name) from None
        except OSError as error:
            raise _unmappable(name, error) from error
        try:
            status = os.fstat(shared.fd)
            reason = _foreign(status) or _wrong_size(status.st_size, n_bytes)
            if reason:
                raise ImageDamaged(f"{name} {reason}", object=name)
            self.n_bytes = status.st_size
            self._map = mmap.mmap(shared.fd, status.st_size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _unmappable(name, error) from error
        finally:
            shared.close_fd()
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmaps. Allowed twice. BufferError while something still borrows the memory, e.g. a session attached to it."""
        _release(self.view, self._map)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def unlink(name: str) -> bool:
    """Removes the name; False if there was none. Who has it mapped keeps the memory."""
    check_name(name)
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return False
    return True


def allow_many_mappings() -> None:
    """Raises this process's limit of open descriptors as far as it may: Python keeps one for each mapping, and the usual soft
    limit of 1,024 would be reached with 500 contexts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _unmappable(name: str, error: OSError) -> EngineError:
    return EngineError(f"{name} cannot be mapped: {os.strerror(error.errno or 0)}", object=name)


def _release(view: memoryview, mapping: mmap.mmap) -> None:
    view.release()
    mapping.close()


def _failed(name: str, n_bytes: int, error: OSError) -> GeistPoolError:
    if error.errno in _FULL:
        return StoreFull(
            f"shared memory has no room for {n_bytes} bytes ({name}): {os.strerror(error.errno or 0)}", needed=n_bytes
        )
    return EngineError(f"{name} could not be created: {os.strerror(error.errno or 0)}", object=name)


def _foreign(status: os.stat_result) -> str | None:
    """Why an object of our name's form is not one that this store made, or None."""
    if not stat.S_ISREG(status.st_mode):
        return "is no regular object"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    if stat.S_IMODE(status.st_mode) != MODE:
        return f"has mode {stat.S_IMODE(status.st_mode):04o} instead of {MODE:04o}"
    return None


def _wrong_size(size: int, wanted: int | None) -> str | None:
    if size == 0:
        return "is empty"
    if wanted is not None and size != wanted:
        return f"is {size} bytes instead of {wanted}"
    return None


# ---- a context's two objects


class Publication:
    """The two objects of a grant, in the making.

    `image` ([image bytes], writable) and `kv` ([n_blocks * kv_block_bytes], or None) are to be filled; `seal` finishes. Whatever
    leaves the `with` unsealed is unlinked. Raises StoreFull with nothing left behind; Internal if the grant's sizes do not agree.
    """

    def __init__(
        self, ref: ContextRef, envelope: Envelope, geometry: Geometry, *, pool: str, fingerprint: str, numerics: int
    ) -> None:
        image_bytes = layout.image_bytes(geometry, ref.n_tokens)
        front = layout.pack(envelope, pool=pool_digest(pool), fingerprint=fingerprint, numerics=numerics, image=image_bytes)
        kv_bytes = layout.kv_object_bytes(geometry, ref.n_blocks)
        _agree(ref, len(front) + image_bytes, kv_bytes)
        with ExitStack() as stack:
            self._image = stack.enter_context(Writer(ref.image, ref.image_bytes))
            self._kv = stack.enter_context(Writer(ref.kv, kv_bytes)) if ref.kv is not None else None
            self._image.view[: len(front)] = front
            self.image = self._image.view[len(front) :]
            self.kv = self._kv.view if self._kv is not None else None
            self._stack = stack.pop_all()

    def seal(self) -> None:
        """Stores the state word, last of all, and keeps both objects."""
        at = layout.STATE_OFFSET
        self._image.view[at : at + 4] = layout.state_bytes(layout.SEALED)
        self._image.keep()
        if self._kv is not None:
            self._kv.keep()

    def close(self) -> None:
        """Unmaps; unlinks both unless sealed. Allowed twice."""
        self.image.release()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _agree(ref: ContextRef, image_bytes: int, kv_bytes: int) -> None:
    granted = (ref.image_bytes, ref.kv_bytes, ref.kv is not None)
    needed = (image_bytes, kv_bytes, kv_bytes > 0)
    if granted != needed:
        raise Internal(
            f"context {ref.id}: granted are {ref.image_bytes} + {ref.kv_bytes} bytes, needed {image_bytes} + {kv_bytes}",
            context=ref.id,
        )


# ---- what is there


class Found(Struct, frozen=True):
    """An object of a pool's name form, whoever made it."""

    name: str
    parts: ObjectName
    n_bytes: int


class Sound(Struct, frozen=True):
    """A whole context that was found again, with its token ids from position 0."""

    envelope: Envelope
    ref: ContextRef
    tokens: tuple[int, ...]


class Residue(Struct, frozen=True):
    """An object that is to be unlinked, and why."""

    name: str
    n_bytes: int
    reason: str


class Scan(Struct, frozen=True):
    """Everything of a pool in shared memory. `sound` has parents before their children; `orphans` are ancestors whose own image
    is gone or unsound and whose KV object is needed by a sound context.
    """

    sound: tuple[Sound, ...]
    orphans: tuple[ContextRef, ...]
    residue: tuple[Residue, ...]

    @property
    def unlink(self) -> list[str]:
        """Names of the residue."""
        return [r.name for r in self.residue]


Check = Callable[[memoryview, Sequence[memoryview], int], Sequence[int]]
"""Verifies a thin image over its KV areas from position 0 (blocks before `first_block` were verified before) and gives its token
ids; raises GeistPoolError. The engine's `Image.check` bound to a model's fingerprint is one."""


def list_objects(pool: str) -> list[Found]:
    """All objects of this user that have this pool's name form, by name: another user may have a pool of the same name."""
    tag = pool_tag(pool)
    found: list[Found] = []
    with os.scandir(SHM) as entries:
        for entry in entries:
            parts = parse_name("/" + entry.name)
            if parts is None or parts.tag != tag:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # unlinked since
                continue
            if status.st_uid != os.geteuid():
                continue
            found.append(Found(name="/" + entry.name, parts=parts, n_bytes=status.st_size))
    return sorted(found, key=lambda f: f.name)


def total_bytes(pool: str) -> int:
    """Bytes of all objects of this pool that have a name."""
    return sum(f.n_bytes for f in list_objects(pool))


def scan(pool: str, *, fingerprint: str, numerics: int, geometry: Geometry, check: Check) -> Scan:
    """Tells what a new broker can adopt from what it must unlink. Changes nothing; only for the holder of the pool's lock.

    Sound is a context whose image and KV objects, those of its ancestors included, are this user's with mode 0600, whose header,
    sizes, pool, fingerprint and numerics agree, and which `check` accepts. Its ancestors' images may be gone.
    """
    allow_many_mappings()
    objects = list_objects(pool)
    residue: dict[str, Residue] = {}
    candidates: dict[str, tuple[Envelope, ContextRef]] = {}
    sizes = {f.name: f.n_bytes for f in objects}
    for found in objects:
        if found.parts.kind != "i":
            continue
        try:
            stored = _read_front(found.name)
            ref = _reference(found, stored, sizes, pool, fingerprint, numerics, geometry)
            if found.parts.context in candidates:
                raise ImageDamaged(f"context {found.parts.context} is there twice")
        except GeistPoolError as error:
            residue[found.name] = Residue(found.name, found.n_bytes, error.message)
            continue
        candidates[ref.id] = (stored.envelope, ref)

    sound = _check_all(candidates, residue, check)
    found_again = {s.ref.id for s in sound}
    needed = {ref.kv: ref for s in sound for ref in s.envelope.chain if ref.kv is not None}
    orphans = tuple(ref for ref in needed.values() if ref.id not in found_again)
    used = {name for s in sound for name in (s.ref.image, s.ref.kv) if name is not None} | set(needed)
    for found in objects:
        if found.name not in used:
            residue.setdefault(found.name, Residue(found.name, found.n_bytes, "belongs to no sound context"))
    return Scan(sound=tuple(sound), orphans=orphans, residue=tuple(residue.values()))


def _check_all(candidates: dict[str, tuple[Envelope, ContextRef]], residue: dict[str, Residue], check: Check) -> list[Sound]:
    """Verifies every candidate, ancestors first, each block once."""
    sound: list[Sound] = []
    verified: set[str] = set()  # names of KV objects
    for envelope, ref in sorted(candidates.values(), key=lambda c: len(c[0].chain)):
        areas = {r.kv: r for r in (*envelope.chain, ref) if r.kv is not None}
        first = min((r.first_block for kv, r in areas.items() if kv not in verified), default=layout.whole_blocks(ref.n_tokens))
        try:
            with ExitStack() as stack:  # no more is mapped at a time than one context needs
                kv = [stack.enter_context(Mapping(name, r.kv_bytes)).view for name, r in areas.items()]
                mapped = stack.enter_context(Mapping(ref.image, ref.image_bytes))
                offset = layout.parse(mapped.view, what=ref.image).image_offset
                image = stack.enter_context(mapped.view[offset:])
                tokens = tuple(check(image, kv, first))
            if len(tokens) != ref.n_tokens:
                raise ImageDamaged(f"{ref.image} holds {len(tokens)} tokens instead of {ref.n_tokens}")
        except GeistPoolError as error:
            residue[ref.image] = Residue(ref.image, ref.image_bytes, error.message)
            continue
        verified.update(areas)
        sound.append(Sound(envelope, ref, tokens))
    return sound


def _read_front(name: str) -> layout.Stored:
    with Mapping(name) as mapped:
        return layout.parse(mapped.view, what=name)


def _reference(
    found: Found,
    stored: layout.Stored,
    sizes: dict[str, int],
    pool: str,
    fingerprint: str,
    numerics: int,
    geometry: Geometry,
) -> ContextRef:
    """The reference under which the context was granted; ImageDamaged or ImageMismatch says why it is none."""
    envelope, name = stored.envelope, found.name
    if stored.pool != pool_digest(pool):
        raise ImageMismatch(f"{name} belongs to another pool")
    if stored.numerics != numerics:
        raise ImageMismatch(f"{name} has numerics version {stored.numerics} instead of {numerics}")
    if stored.fingerprint != fingerprint:
        raise ImageMismatch(f"{name} was made from another model")
    if envelope.id != found.parts.context:
        raise ImageDamaged(f"{name} holds context {envelope.id}")
    if stored.image_bytes != layout.image_bytes(geometry, envelope.n_tokens):
        raise ImageMismatch(f"{name} does not have the size of {envelope.n_tokens} tokens of this model")
    kv_bytes = layout.kv_object_bytes(geometry, envelope.n_blocks)
    kv = name.replace("-i", "-k") if kv_bytes else None
    if kv is not None and sizes.get(kv) != kv_bytes:
        raise ImageDamaged(f"{name} lacks its KV object of {kv_bytes} bytes")
    for ref in envelope.chain:
        _check_ancestor(name, ref, sizes, pool, geometry)
    return ContextRef(
        id=envelope.id,
        image=name,
        image_bytes=found.n_bytes,
        kv=kv,
        kv_bytes=kv_bytes,
        first_block=envelope.first_block,
        n_blocks=envelope.n_blocks,
        n_tokens=envelope.n_tokens,
    )


def _check_ancestor(name: str, ref: ContextRef, sizes: dict[str, int], pool: str, geometry: Geometry) -> None:
    """Whether an ancestor's blocks are there; its image is not asked for."""
    needed = layout.kv_object_bytes(geometry, ref.n_blocks)
    if ref.kv is None:
        if needed:
            raise ImageDamaged(f"{name}: its ancestor {ref.id} has {ref.n_blocks} blocks and no object for them")
        return
    parts = parse_name(ref.kv)
    if parts is None or (parts.tag, parts.kind, parts.context) != (pool_tag(pool), "k", ref.id):
        raise ImageDamaged(f"{name}: the blocks of its ancestor {ref.id} are not under a name of theirs")
    if ref.kv_bytes != needed or sizes.get(ref.kv) != needed:
        raise ImageDamaged(f"{name} lacks the KV object of {needed} bytes of its ancestor {ref.id}")

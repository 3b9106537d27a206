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
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import posix_ipc
from msgspec import Struct

from geist_pool.errors import GeistPoolError, ImageDamaged, ImageMismatch, Internal, StoreFull
from geist_pool.protocol import ContextRef, Envelope, Geometry
from geist_pool.store import layout
from geist_pool.store.names import ObjectName, check_name, parse_name, pool_digest, pool_tag

SHM: Final = Path("/dev/shm")  # where Linux keeps POSIX shared memory; posix_ipc cannot list it
MODE: Final = 0o600
_FULL: Final = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


def _reserve(fd: int, n: int) -> None:
    os.posix_fallocate(fd, 0, n)


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
        try:
            _reserve(shared.fd, n_bytes)
            self._map = mmap.mmap(shared.fd, n_bytes)
        except OSError as error:
            unlink(name)
            raise _failed(name, n_bytes, error) from error
        except BaseException:
            unlink(name)
            raise
        finally:
            shared.close_fd()
        self.view = memoryview(self._map)

    def keep(self) -> None:
        """The object stays when the writer closes."""
        self._kept = True

    def close(self) -> None:
        """Unmaps, and unlinks unless kept. Allowed twice. BufferError if a borrowed view lives on; the name is gone even so."""
        if not self._kept:
            unlink(self.name)
            self._kept = True
        _release(self.view, self._map)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Mapping:
    """An object mapped read-only. `view` is its memory.

    Raises ImageDamaged if there is no such object, or one of another size than `n_bytes`, or not this user's with mode 0600.
    """

    def __init__(self, name: str, n_bytes: int | None = None) -> None:
        check_name(name)
        self.name = name
        try:
            shared = posix_ipc.SharedMemory(name, read_only=True)
        except (posix_ipc.ExistentialError, posix_ipc.PermissionsError) as error:
            raise ImageDamaged(f"{name} cannot be opened: {error}", object=name) from None
        try:
            status = os.fstat(shared.fd)
            reason = _foreign(status) or _wrong_size(status.st_size, n_bytes)
            if reason:
                raise ImageDamaged(f"{name} {reason}", object=name)
            self.n_bytes = status.st_size
            self._map = mmap.mmap(shared.fd, status.st_size, access=mmap.ACCESS_READ)
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


def _release(view: memoryview, mapping: mmap.mmap) -> None:
    view.release()
    mapping.close()


def _failed(name: str, n_bytes: int, error: OSError) -> GeistPoolError:
    if error.errno in _FULL:
        return StoreFull(
            f"shared memory has no room for {n_bytes} bytes ({name}): {os.strerror(error.errno or 0)}", needed=n_bytes
        )
    return Internal(f"{name} could not be created: {error}", object=name)


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
    """Everything of a pool in shared memory; `sound` has parents before their children."""

    sound: tuple[Sound, ...]
    residue: tuple[Residue, ...]

    @property
    def unlink(self) -> list[str]:
        """Names of the residue."""
        return [r.name for r in self.residue]


Check = Callable[[memoryview, Sequence[memoryview], int], Sequence[int]]
"""Verifies a thin image over its KV areas from position 0 (blocks before `first_block` were verified before) and gives its token
ids; raises GeistPoolError. The engine's `Image.check` bound to a model's fingerprint is one."""


def list_objects(pool: str) -> list[Found]:
    """All objects that have this pool's name form, by name."""
    tag = pool_tag(pool)
    found: list[Found] = []
    with os.scandir(SHM) as entries:
        for entry in entries:
            parts = parse_name("/" + entry.name)
            if parts is None or parts.tag != tag:
                continue
            try:
                size = entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:  # unlinked since
                continue
            found.append(Found(name="/" + entry.name, parts=parts, n_bytes=size))
    return sorted(found, key=lambda f: f.name)


def total_bytes(pool: str) -> int:
    """Bytes of all objects of this pool that have a name."""
    return sum(f.n_bytes for f in list_objects(pool))


def scan(pool: str, *, fingerprint: str, numerics: int, geometry: Geometry, check: Check) -> Scan:
    """Tells what a new broker can adopt from what it must unlink. Changes nothing; only for the holder of the pool's lock.

    Sound is a context whose objects are this user's with mode 0600, whose header, sizes, pool, fingerprint and numerics agree,
    whose ancestors are sound as well, and which `check` accepts.
    """
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
    used = {name for s in sound for name in (s.ref.image, s.ref.kv) if name is not None}
    for found in objects:
        if found.name not in used:
            residue.setdefault(found.name, Residue(found.name, found.n_bytes, "belongs to no sound context"))
    return Scan(sound=tuple(sound), residue=tuple(residue.values()))


def _check_all(candidates: dict[str, tuple[Envelope, ContextRef]], residue: dict[str, Residue], check: Check) -> list[Sound]:
    """Verifies parents before children; a child is as sound as its parent."""
    sound: list[Sound] = []
    with ExitStack() as stack:
        areas: dict[str, list[memoryview]] = {}  # KV of sound contexts from position 0
        waiting = dict(candidates)
        while True:
            ready = [i for i, (e, _) in waiting.items() if e.parent is None or e.parent in areas]
            if not ready:
                break
            for context in ready:
                envelope, ref = waiting.pop(context)
                above = areas[envelope.parent] if envelope.parent is not None else []
                try:
                    own = [stack.enter_context(Mapping(ref.kv, ref.kv_bytes)).view] if ref.kv is not None else []
                    with Mapping(ref.image, ref.image_bytes) as mapped:
                        offset = layout.parse(mapped.view, what=ref.image).image_offset
                        with mapped.view[offset:] as image:
                            tokens = tuple(check(image, [*above, *own], ref.first_block))
                    if len(tokens) != ref.n_tokens:
                        raise ImageDamaged(f"{ref.image} holds {len(tokens)} tokens instead of {ref.n_tokens}")
                except GeistPoolError as error:
                    residue[ref.image] = Residue(ref.image, ref.image_bytes, error.message)
                    continue
                areas[context] = [*above, *own]
                sound.append(Sound(envelope, ref, tokens))
    for _, ref in waiting.values():
        residue[ref.image] = Residue(ref.image, ref.image_bytes, "its parent is not sound")
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

"""Packed weights as files: one per (fingerprint, layout, numerics), shared by all processes through the page cache.

    DIR/<first 32 digits of the fingerprint>-l<layout>-n<numerics>.packed     mapped read-only, complete whenever it has this name
    DIR/known/<device>-<inode>.json      the fingerprint of a GGUF, believed while size and modification time are unchanged
    DIR/lock                             held (flock) while something is packed
    DIR/*.tmp                            a file in the making; stale if seen by the lock's holder

What is inside a packed file is the engine's business.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
from msgspec import Struct

from geist_pool.errors import EngineError, ImageDamaged, ModelError

MADV_POPULATE_READ: Final = 22  # of Linux 5.14; Python has no name for it yet
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Identity(Struct, frozen=True):
    """What a file is known by without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> Identity:
        """Raises ModelError if the file cannot be looked at."""
        try:
            status = path.stat()
        except OSError as error:
            raise ModelError(f"{path} cannot be opened: {error.strerror}") from error
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class _Known(Struct, frozen=True):
    identity: Identity
    fingerprint: str


class FileMapping:
    """A file mapped read-only. `view` is its memory; page-aligned."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError, or ImageDamaged for an empty file."""
        with path.open("rb") as f:
            if os.fstat(f.fileno()).st_size == 0:
                raise ImageDamaged(f"{path} is empty")
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        self.view = memoryview(self._map)

    def populate(self) -> None:
        """Maps every page now, in one go, rather than a few at a time under the first pass over them. A kernel that cannot do it
        makes no difference but that."""
        with suppress(OSError):
            self._map.madvise(MADV_POPULATE_READ)

    def close(self) -> None:
        """Unmaps. Allowed twice. BufferError while a model is still bound to it."""
        self.view.release()
        self._map.close()


def draft_path(directory: Path, pid: int) -> Path:
    """Where the process of this id makes a packed file; whoever kills it removes what it left there."""
    return directory / f"{pid}.tmp"


class Draft:
    """A packed file in the making, under a temporary name; gone on leaving unless `publish` was called.

    `view` ([n_bytes], writable, zeros) of the file `path` is backed by reserved disk space. Raises EngineError where there is no
    room.
    """

    def __init__(self, directory: Path, n_bytes: int) -> None:
        self.path = draft_path(directory, os.getpid())
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EngineError(f"{self.path} cannot be made: {error.strerror}") from error
        try:
            os.posix_fallocate(fd, 0, n_bytes)
            self._map = mmap.mmap(fd, n_bytes)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            if error.errno in _FULL:
                raise EngineError(
                    f"no room for {n_bytes} bytes of packed weights in {directory}: {error.strerror}", needed=n_bytes
                ) from error
            raise EngineError(f"{self.path} could not be reserved: {error.strerror}") from error
        finally:
            os.close(fd)
        self.view = memoryview(self._map)

    def publish(self, target: Path) -> None:
        """Gives the file its name, whole."""
        self._map.flush()
        self.path.replace(target)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.path.unlink(missing_ok=True)
        self.view.release()
        self._map.close()


class PackedCache:
    """The directory. Several processes may use it at once."""

    def __init__(self, directory: Path) -> None:
        """Creates it where it is missing. Raises EngineError if that is not possible."""
        self.directory = directory
        try:
            (directory / "known").mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"the cache directory {directory} cannot be made: {error.strerror}") from error

    def path(self, fingerprint: str, layout: int, numerics: int) -> Path:
        """Where the packed weights of this key lie, or will."""
        return self.directory / f"{fingerprint[:32]}-l{layout}-n{numerics}.packed"

    def any_of_size(self, n_bytes: int, layout: int, numerics: int) -> bool:
        """Whether some model's packed weights have exactly this size, so that taking a fingerprint may save packing."""
        return any(p.stat().st_size == n_bytes for p in self.directory.glob(f"*-l{layout}-n{numerics}.packed"))

    def known(self, identity: Identity) -> str | None:
        """The fingerprint taken earlier from the file of exactly this identity, or None."""
        try:
            text = self._known_path(identity).read_bytes()
            known = msgspec.json.decode(text, type=_Known)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return known.fingerprint if known.identity == identity else None

    def remember(self, identity: Identity, fingerprint: str) -> None:
        """Keeps the fingerprint for `known`. Call under the lock."""
        path = self._known_path(identity)
        temporary = path.with_suffix(".new")
        try:
            temporary.write_bytes(msgspec.json.encode(_Known(identity, fingerprint)))
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise EngineError(f"{path} cannot be written: {error.strerror}") from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the directory alone, waiting for whoever has it; what dead processes left half-made is removed."""
        try:
            fd = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EngineError(f"the cache directory {self.directory} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            for stale in self.directory.glob("*.tmp"):
                stale.unlink(missing_ok=True)
            yield
        finally:
            os.close(fd)

    def draft(self, n_bytes: int) -> Draft:
        """Room for `n_bytes` of packed weights. Call under the lock."""
        return Draft(self.directory, n_bytes)

    def _known_path(self, identity: Identity) -> Path:
        return self.directory / "known" / f"{identity.device}-{identity.inode}.json"

"""Contexts as files: for keeping them longer than shared memory lasts.

    0          128                            image_offset               image_offset + image_bytes = size of the file
    | header   | MessagePack Envelope | zeros | flat image, as the engine writes it              |

Header and envelope are those of an image object (layout.py), always with the state "sealed": a file is written under a temporary
name in the same directory, flushed to the disk, and only then given its name, so that under a name there is a whole file or none.
A flat image holds all its KV blocks, so the envelope names no parent and no ancestors. The pool's name in the header is the
writer's and is not compared: a file may be loaded by any pool of the same model and numerics.

Reading and writing go piece by piece, so that whoever does it can do something else in between.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import msgspec

from geist_pool.errors import EngineError, GeistPoolError, ImageDamaged, StoreFull, UnknownContext
from geist_pool.protocol import Envelope
from geist_pool.store import layout, unfinished
from geist_pool.store.names import pool_digest

MODE: Final = 0o600
PIECE: Final = 8 << 20  # bytes read or written at a time
TEMPORARY: Final = ".tmp"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Head(NamedTuple):
    """What a saved file says of itself in front of its image."""

    envelope: Envelope
    n_tokens: int
    fingerprint: str  # of the model, hexadecimal
    file_bytes: int


def peek(path: str | Path) -> Head:
    """Reads and checks the head of a saved file, and nothing behind it.

    Raises UnknownContext if there is no such file, ImageDamaged if it is cut, foreign or its head does not agree with itself,
    EngineError if it cannot be read. Errors name the file without its directory.
    """
    with _opened(Path(path)) as (fd, size):
        stored = _head(fd, size, Path(path).name)
    return Head(stored.envelope, stored.envelope.n_tokens, stored.fingerprint, size)


def remove_stale(directory: Path) -> int:
    """Removes what killed writers left half-made in a directory, which may be missing; how many files. A writer that lives holds
    a lock on its file."""
    removed = 0
    for path in directory.glob(f".*{TEMPORARY}"):
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
            finally:
                os.close(fd)
    return removed


class Reader:
    """A saved file, to be read in pieces: `for _ in reader: ...`, then `image` is the flat image, whole but not verified.

    Raises as `peek`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        with _opened(self._path) as (fd, size):
            self.stored = _head(fd, size, self._path.name)
            self._fd = os.dup(fd)
        self.image = bytearray(self.stored.image_bytes)

    def __iter__(self) -> Iterator[int]:
        """Reads a piece a step; gives the bytes read so far."""
        at = 0
        with memoryview(self.image) as view:
            while at < len(view):
                try:
                    n = os.preadv(self._fd, [view[at : at + PIECE]], self.stored.image_offset + at)
                except OSError as error:
                    raise _failed(self._path, error) from error
                if n == 0:
                    raise ImageDamaged(f"{self._path.name} was cut while it was read", file=self._path.name)
                at += n
                yield at

    def close(self) -> None:
        """Allowed twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Writer:
    """A file in the making: `for _ in writer.write(image): ...`, then `publish`. Gone on leaving unless that was called; so is
    what killed writers left in the directory.

    `envelope` is made that of a context without ancestors. Raises StoreFull where the disk is full, EngineError where the
    directory cannot be written to; nothing is left then, and a file of that name stays as it was.
    """

    def __init__(self, path: str | Path, envelope: Envelope, *, pool: str, fingerprint: str, numerics: int) -> None:
        self._path = Path(path)
        self._temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}{TEMPORARY}")
        self._envelope = alone(envelope)
        self._pool = pool_digest(pool)
        self._fingerprint = fingerprint
        self._numerics = numerics
        remove_stale(self._path.parent)
        try:
            self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except OSError as error:
            raise _failed(self._path, error) from error
        self._token = unfinished.begin(self._remove)
        self.n_bytes = 0

    def write(self, image: bytearray) -> Iterator[int]:
        """Writes head and flat image to the disk, a piece a step; gives the bytes written so far."""
        front = bytearray(
            layout.pack(self._envelope, pool=self._pool, fingerprint=self._fingerprint, numerics=self._numerics, image=len(image))
        )
        front[layout.STATE_OFFSET : layout.STATE_OFFSET + 4] = layout.state_bytes(layout.SEALED)
        for part in (front, image):
            with memoryview(part) as view:
                for start in range(0, len(view), PIECE):
                    self._put(view[start : start + PIECE])
                    yield self.n_bytes

    def publish(self) -> int:
        """Gives the file its name, in place of an older one; its bytes."""
        try:
            os.fsync(self._fd)
            self._temporary.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise _failed(self._path, error) from error
        unfinished.end(self._token)
        return self.n_bytes

    def close(self) -> None:
        """Allowed twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._remove()
            unfinished.end(self._token)

    def _put(self, piece: memoryview) -> None:
        """Each piece goes to the disk before the next one, so that no step waits for all of them."""
        try:
            done = 0
            while done < len(piece):
                done += os.write(self._fd, piece[done:])
            os.fdatasync(self._fd)
        except OSError as error:
            raise _failed(self._path, error) from error
        self.n_bytes += len(piece)

    def _remove(self) -> None:
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def alone(envelope: Envelope) -> Envelope:
    """The envelope of a context that holds all its blocks itself."""
    return msgspec.structs.replace(
        envelope, parent=None, first_block=0, n_blocks=layout.whole_blocks(envelope.n_tokens), chain=()
    )


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe of that name keeps nobody waiting
    except FileNotFoundError as error:
        raise UnknownContext(f"there is no file {path.name}", file=path.name) from error
    except OSError as error:
        raise _failed(path, error) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ImageDamaged(f"{path.name} is no regular file", file=path.name)
        yield fd, status.st_size
    finally:
        os.close(fd)


def _head(fd: int, size: int, what: str) -> layout.Stored:
    try:
        start = os.pread(fd, layout.HEADER_BYTES, 0)
        offset = layout.front_bytes(start, what=what)
        front = start if offset > size else os.pread(fd, offset, 0)
    except OSError as error:
        raise _failed(Path(what), error) from error
    stored = layout.parse_front(memoryview(front), size, what=what)
    if stored.envelope != alone(stored.envelope):
        raise ImageDamaged(f"{what} names ancestors, and a file has none", file=what)
    return stored


def _failed(path: Path, error: OSError) -> GeistPoolError:
    name, words = path.name, os.strerror(error.errno or 0)
    if error.errno in _FULL:
        return StoreFull(f"there is no room on the disk for {name}: {words}", file=name)
    return EngineError(f"{name} cannot be read or written: {words}", file=name)

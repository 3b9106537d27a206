"""What every kind of download shares: telling how far it is, one at a time for a directory, copying with a hash."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from geist_pool.errors import DownloadError

CHUNK: Final = 1 << 20

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes so far, and bytes in all (0: unknown)."""


def no_progress(_what: str, _done: int, _total: int) -> None:
    pass


@contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Holds the lock file, waiting for another process that has it."""
    with lock.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def copy_hashed(src: IO[bytes], dst: IO[bytes], total: int, what: str, progress: Progress) -> str:
    """Copies everything and returns its SHA-256; stops with DownloadError beyond `total` bytes if that is not 0."""
    digest, done = hashlib.sha256(), 0
    progress(what, 0, total)
    while block := src.read(CHUNK):
        done += len(block)
        if total and done > total:
            raise DownloadError(f"more than the announced {total} bytes arrived; not kept")
        digest.update(block)
        dst.write(block)
        progress(what, done, total)
    return digest.hexdigest()

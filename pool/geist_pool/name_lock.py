"""The lock file of a pool's name: whoever holds it is the pool of that name."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from geist_pool.errors import NameTaken

PATIENCE_S: Final = 1.0  # the children of a killed supervisor need a moment to notice


def take_lock(path: Path, name: str) -> int:
    """An open, locked descriptor with this process's id in the file. Raises NameTaken that tells who holds it."""
    until = time.monotonic() + PATIENCE_S
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file(fd, path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except BlockingIOError:
            if time.monotonic() > until:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(fd)
                words = f"a pool named {name!r} is running already (process {holder}); stop it or choose another --name"
                raise NameTaken(words, path="name") from None
        os.close(fd)
        time.sleep(0.02)


def _is_file(fd: int, path: Path) -> bool:
    """Whether the path still leads to the open file: who stops a pool removes its lock file."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False

"""Processes of workers, by descriptors that cannot come to mean another process."""

from __future__ import annotations

import os
import signal
from pathlib import Path


class Link:
    """A worker's connection and process. Owns the process descriptor."""

    def __init__(self, name: str, identity: bytes, pid: int, pidfd: int) -> None:
        self.name = name
        self.identity = identity
        self.pid = pid
        self.pidfd = pidfd


def open_process(pid: int) -> int | None:
    """A descriptor of another process of this user, or None."""
    if pid <= 1 or pid == os.getpid():
        return None
    try:
        pidfd = os.pidfd_open(pid)
        if Path(f"/proc/{pid}").stat().st_uid == os.geteuid():
            return pidfd
    except OSError:
        return None
    os.close(pidfd)
    return None


def kill(link: Link) -> None:
    try:
        signal.pidfd_send_signal(link.pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return  # dead already; its descriptor says so

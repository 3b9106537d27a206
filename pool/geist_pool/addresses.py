"""Addresses that a pool listens at: whether somebody is there already, and what a pool that is gone has left there."""

from __future__ import annotations

import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from geist_pool.errors import ConfigError

PATIENCE_S: Final = 1.0


def refuse_taken(address: str) -> None:
    """Raises ConfigError where somebody answers at the ipc or tcp address, or where a file lies that is no socket.

    libzmq removes whatever is at an ipc address before it binds there.
    """
    if not address.startswith("ipc://"):
        if _accepts(address):
            raise ConfigError(f"somebody listens at {address} already", path="address")
        return
    path = Path(address.removeprefix("ipc://"))
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be looked at: {error.strerror}", path="address") from None
    if not is_socket:
        raise ConfigError(f"{path} is no socket; it is not replaced", path="address")
    if _accepts(address):
        raise ConfigError(f"somebody listens at {address} already", path="address")


def remove_left(address: str) -> None:
    """Removes the socket of an ipc address that nobody listens at any more; what is another's, or no socket, stays."""
    if address.startswith("ipc://"):
        path = Path(address.removeprefix("ipc://"))
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode) and not _accepts(address):
                path.unlink()


def _accepts(address: str) -> bool:
    """Whether somebody is there. Only a refusal, or nothing at all, says that nobody is."""
    try:
        if address.startswith("ipc://"):
            with socket.socket(socket.AF_UNIX) as s:
                s.settimeout(PATIENCE_S)
                s.connect(address.removeprefix("ipc://"))
        else:
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        return True
    return True

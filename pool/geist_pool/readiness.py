"""How the world hears that the pool is ready: a file, and the datagram that systemd waits for (Type=notify)."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from geist_pool import observe
from geist_pool.errors import ConfigError


class Readiness:
    """Tells when the pool is ready and when it no longer is.

    file: path of the ready file, or None. notify_socket: address of the service manager's socket, or None.
    """

    def __init__(self, file: Path | None, notify_socket: str | None) -> None:
        self._file = file
        self._socket = notify_socket
        self._log = observe.logger("supervisor")
        self._told = False

    def prepare(self) -> None:
        """Removes the file of a pool that was killed. Raises ConfigError where it could not be written later."""
        if self._file is None:
            return
        try:
            self._file.unlink(missing_ok=True)
        except OSError as e:
            raise ConfigError(f"the ready file {self._file} cannot be replaced: {e.strerror}", path="ready_file") from None
        if not os.access(self._file.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"the ready file's directory {self._file.parent} is not there or not writable", path="ready_file")

    def announce(self, **facts: str | int) -> None:
        """The pool is ready: the file appears, `facts` as a JSON object in it. Raises ConfigError if it cannot be written."""
        self._told = True
        if self._file is not None:
            temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}")
            try:
                temporary.write_bytes(msgspec.json.encode(facts) + b"\n")
                temporary.replace(self._file)
            except OSError as e:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise ConfigError(f"the ready file {self._file} cannot be written: {e.strerror}", path="ready_file") from None
        self._notify("READY=1")

    def withdraw(self) -> None:
        """The pool stops. Does nothing if it never was ready, or the second time."""
        if not self._told:
            return
        self._told = False
        if self._file is not None:
            with suppress(OSError):  # somebody made its directory unwritable: nothing here can change that
                self._file.unlink(missing_ok=True)
        self._notify("STOPPING=1")

    def _notify(self, state: str) -> None:
        if self._socket is None:
            return
        address = f"\0{self._socket[1:]}" if self._socket.startswith("@") else self._socket  # "@": in the abstract namespace
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as s:
                s.settimeout(1.0)
                s.sendto(state.encode(), address)
        except OSError as e:
            self._log.warning("service manager not told", state=state, error=str(e))

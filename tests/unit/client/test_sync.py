"""What only the blocking client has to stand.

Property: an interrupt ends the call, cancels the request, and leaves a client that works. Tolerance: none. Reason: Ctrl-C in the
middle of a message must not garble the next one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from geist_pool.client import Client
from geist_pool.protocol import Cancel, Generate, Reply, Request

Send = Callable[[bytes, Reply | bytes], None]


class Reluctant:
    """A socket that cannot be written to twice, though it said so."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._it = socket
        self.refusals = 2

    def send_multipart(self, frames: tuple[bytes, ...], flags: int = 0) -> object:
        if self.refusals:
            self.refusals -= 1
            raise zmq.Again
        return self._it.send_multipart(frames, flags)

    def __getattr__(self, name: str) -> object:
        return getattr(self._it, name)


def test_connection_that_breaks_just_before_a_send_is_waited_for(tmp_path: Path, script: SimpleNamespace) -> None:
    with script.serving(tmp_path, script.echo) as pool, Client(pool.address) as client:
        socket = client._socket
        client._socket = reluctant = Reluctant(socket)  # type: ignore[assignment]
        try:
            assert client.tokenize("a").tokens == (97,)
        finally:
            client._socket = socket
        assert reluctant.refusals == 0


def test_ctrl_c_leaves_a_usable_client(tmp_path: Path, script: SimpleNamespace) -> None:
    def interrupt(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Generate):
            threading.Event().wait(0.05)  # until the client waits; one interrupted in sending would connect anew instead
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            script.echo(rid, request, send)

    with script.serving(tmp_path, interrupt) as pool, Client(pool.address) as client:
        with pytest.raises(KeyboardInterrupt):
            client.generate("x")
        rid = pool.seen[0][0]
        cancel = pool.wait_for(Cancel)[1]
        assert isinstance(cancel, Cancel) and cancel.id.encode() == rid
        assert client.tokenize("on").tokens == tuple(b"on")

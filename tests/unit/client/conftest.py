"""A broker that answers by script, and one face for both clients.

`connect` makes a `Client`, or an `AsyncClient` whose every operation is run to its end in a loop of the test: what is tested with
it holds for both.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from geist_pool import protocol
from geist_pool.client import AsyncClient, Client
from geist_pool.protocol import GenerateResult, Reply, Request, Tokenize, TokenizeResult, Usage

decoder = msgspec.msgpack.Decoder(Request)
Send = Callable[[bytes, Reply | bytes], None]
Handler = Callable[[bytes, Request, Send], None]

ANSWER = GenerateResult(
    usage=Usage(1, 2, 3), timings=protocol.Timings(), text="hi", raw=b"hi", tokens=(5, 6), finish_reason="length", seed=9
)


class Pool:
    """A broker that answers by script. `seen` holds (request id, request) in order of arrival."""

    def __init__(self, address: str, handler: Handler) -> None:
        self.address = address
        self.seen: list[tuple[bytes, Request]] = []
        self._handler = handler
        self._stop = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(address)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(20):
                continue
            peer, magic, rid, body = self._socket.recv_multipart()
            assert magic == protocol.MAGIC
            request = decoder.decode(body)
            self.seen.append((rid, request))

            def send(to: bytes, reply: Reply | bytes, peer: bytes = peer) -> None:
                data = reply if isinstance(reply, bytes) else protocol.encode(reply)
                self._socket.send_multipart((peer, protocol.MAGIC, to, data))

            self._handler(rid, request, send)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()
        self._context.term()

    def pause(self) -> None:
        threading.Event().wait(0.01)

    def wait_for(self, kind: type[Request]) -> tuple[bytes, Request]:
        for _ in range(500):
            for rid, request in list(self.seen):
                if isinstance(request, kind):
                    return rid, request
            self.pause()
        raise AssertionError(f"no {kind.__name__} arrived")


@contextmanager
def serving(path: Path, handler: Handler) -> Iterator[Pool]:
    """Such a broker at `pool.ipc` in the directory."""
    pool = Pool(f"ipc://{path / 'pool.ipc'}", handler)
    try:
        yield pool
    finally:
        pool.close()


def tokens_of(text: str) -> Reply:
    return Reply(ok=True, result=TokenizeResult(tuple(text.encode())))


def echo(rid: bytes, request: Request, send: Send) -> None:
    if isinstance(request, Tokenize):
        send(rid, tokens_of(request.text))


class Driven:
    """An object of the asynchronous client, each coroutine run to its end."""

    def __init__(self, it: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._it = it
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._it, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            out = found(*args, **kwargs)
            if name == "stream":
                return Driven(self._loop.run_until_complete(out.start()), self._loop)
            return self._loop.run_until_complete(out) if inspect.isawaitable(out) else out

        return call

    def __iter__(self) -> Driven:
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.run_until_complete(self._it.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Driven:
        self._loop.run_until_complete(self._it.__aenter__())
        return self

    def __exit__(self, *what: Any) -> None:
        self._loop.run_until_complete(self._it.__aexit__(*what))


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes a client of one kind; both kinds have the same arguments and methods."""
    if request.param == "blocking":
        yield Client
        return
    loop = asyncio.new_event_loop()
    yield lambda *args, **kwargs: Driven(AsyncClient(*args, **kwargs), loop)
    left = [task for task in asyncio.all_tasks(loop) if not task.done()]
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    assert not left, f"tasks left behind: {left}"


@pytest.fixture
def script() -> SimpleNamespace:
    """What the tests say to and of the scripted broker."""
    return SimpleNamespace(serving=serving, Pool=Pool, tokens_of=tokens_of, echo=echo, answer=ANSWER)

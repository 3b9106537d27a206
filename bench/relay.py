"""The floor for a round trip by way of a broker: three processes that only hand messages on.

    this process ─► relay (two ROUTERs) ─► echo ─► relay ─► this process

The same sockets, hops and frames as a pool's, and nothing done with them. `python -m bench.relay relay|echo ...` runs a part.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import zmq

ROUND_TRIP_MS = 10_000


@contextmanager
def linger_free() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A context whose sockets keep nothing when they are closed."""
    with zmq.Context() as context:
        context.setsockopt(zmq.LINGER, 0)
        yield context


@contextmanager
def running() -> Iterator[zmq.Socket[bytes]]:
    """A DEALER whose messages [request id, body] come back by way of the other two processes."""
    with ExitStack() as stack:
        where = stack.enter_context(tempfile.TemporaryDirectory(prefix="gp-"))
        front, back = f"ipc://{where}/front", f"ipc://{where}/back"
        for part in (("relay", front, back), ("echo", back)):
            process = subprocess.Popen([sys.executable, "-m", "bench.relay", *part])
            stack.callback(process.wait)
            stack.callback(process.kill)
        context = stack.enter_context(linger_free())
        socket = stack.enter_context(context.socket(zmq.DEALER))
        socket.connect(front)
        round_trip(socket, [b"first", b""])
        yield socket


def round_trip(socket: zmq.Socket[bytes], frames: list[bytes]) -> list[bytes]:
    """Raises TimeoutError."""
    socket.send_multipart(frames)
    if not socket.poll(ROUND_TRIP_MS):
        raise TimeoutError("nothing came back")
    return socket.recv_multipart()


def relay(front: str, back: str) -> None:
    with linger_free() as context, context.socket(zmq.ROUTER) as clients, context.socket(zmq.ROUTER) as workers:
        workers.bind(back)
        worker = workers.recv_multipart()[0]  # before clients can come
        clients.bind(front)
        poller = zmq.Poller()
        poller.register(clients, zmq.POLLIN)
        poller.register(workers, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if workers in ready:
                clients.send_multipart(workers.recv_multipart()[1:])
            if clients in ready:
                workers.send_multipart([worker, *clients.recv_multipart()])


def echo(back: str) -> None:
    with linger_free() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(back)
        socket.send(b"here")
        while True:
            socket.send_multipart(socket.recv_multipart())


if __name__ == "__main__":
    if sys.argv[1] == "relay":
        relay(*sys.argv[2:])
    else:
        echo(*sys.argv[2:])

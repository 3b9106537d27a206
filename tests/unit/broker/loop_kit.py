"""A broker's loop among real sockets, with text work, shared memory and workers made of paper."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest
import zmq

from geist_pool.broker.events import Adopted
from geist_pool.broker.loop import Loop
from geist_pool.broker.machine import Machine, MachineConfig
from geist_pool.protocol import (
    Announce,
    Assign,
    CreateWork,
    Done,
    Forget,
    Forgotten,
    GenerateDone,
    GenerateWork,
    Geometry,
    Hello,
    Mapped,
    Ping,
    Pong,
    Reply,
    Stats,
    Timings,
    Tokens,
    Usage,
    encode,
    to_worker_decoder,
)

PATIENCE_S = 20.0
GEOMETRY = Geometry(header_bytes=4096, n_vocab=256, recurrent_bytes=8192, kv_bytes_per_token=64, kv_block_bytes=4096)
decode_reply = msgspec.msgpack.Decoder(Reply).decode


class FakeText:
    """Ids are characters' codes, at once."""

    def __init__(self, do_text) -> None:
        self._do = do_text
        self._done: deque = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def at_once(self, job) -> None:
        return None

    def submit(self, job) -> None:
        self._done.append(self._do(job))
        os.eventfd_write(self._fd, 1)

    def poll(self) -> list:
        os.eventfd_read(self._fd)
        out = list(self._done)
        self._done.clear()
        return out

    def close(self) -> None:
        os.close(self._fd)


class FakeStore:
    def __init__(self) -> None:
        self.unlinked: list[str] = []
        self.emptied = False
        self.bindings = None

    def adopt(self, order) -> Adopted:
        return Adopted((), ("/gp-00000000-000000000000-i1",))

    def unlink(self, name: str) -> None:
        self.unlinked.append(name)

    def keep_bindings(self, order) -> None:
        self.bindings = order.bindings

    def unlink_all(self) -> None:
        self.emptied = True


class FakeWorker:
    """A worker's socket in this thread, and a process whose death is the worker's."""

    def __init__(self, pool: Pool, name: str) -> None:
        self.name = name
        self.process = subprocess.Popen(["sleep", "1000"])
        self.socket = pool.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(pool.worker_address)

    def hello(self) -> None:
        self.say(
            Hello(
                worker=self.name, pid=self.process.pid, protocol=1, fingerprint="ab" * 32, numerics=1, image_format=1,
                geometry=GEOMETRY, architecture="llama", n_vocab=256, n_ctx=1000, kv_type="f16", tier="scalar", threads=1,
                slots=1,
            )
        )  # fmt: skip

    def say(self, message) -> None:
        self.socket.send(encode(message))

    def hear(self, kind):
        """The next message of this kind; pings and announcements on the way are answered."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if not self.socket.poll(200):
                continue
            message = to_worker_decoder.decode(self.socket.recv())
            if isinstance(message, kind):
                return message
            if isinstance(message, Ping):
                self.say(Pong(message.n))
            elif isinstance(message, Announce):
                self.say(Mapped(message.chain[-1].id))
            elif isinstance(message, Forget):
                self.say(Forgotten(message.context))
        raise AssertionError(f"worker {self.name} never heard {kind.__name__}")

    def serve(self, *, chunks: int = 0) -> Assign:
        """Takes the next job and answers it."""
        assign = self.hear(Assign)
        work = assign.work
        usage = Usage(prefilled=len(work.tokens))
        if isinstance(work, CreateWork):
            from geist_pool.protocol import CreateDone

            self.say(Done(assign.job, assign.attempt, CreateDone(1), usage, Timings()))
            return assign
        assert isinstance(work, GenerateWork)
        for i in range(chunks):
            self.say(Tokens(assign.job, assign.attempt, i, (97,), b"a", None, i))
        n = chunks or work.max_tokens
        done = GenerateDone((97,) * n, b"a" * n, "length", None, None)
        self.say(Done(assign.job, assign.attempt, done, usage, Timings()))
        return assign

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.close()


class Pool:
    def __init__(self, path, do_text, **options) -> None:
        self.address = f"ipc://{path}/c.ipc"
        self.worker_address = f"ipc://{path}/w.ipc"
        self.context: zmq.Context = zmq.Context()
        self.text = FakeText(do_text)
        self.store = FakeStore()
        self.machine = Machine(
            MachineConfig(
                pool="test", store="test", version="0", model="toy", n_vocab=256, eog=(0,), has_template=False, memory=1 << 24,
                heartbeat_s=options.pop("heartbeat_s", 1.0), worker_timeout_s=options.pop("worker_timeout_s", 60.0),
            ),
            random.Random(1),
        )  # fmt: skip
        self.loop = Loop(self.machine, self.text, self.store, address=self.address, worker_address=self.worker_address, **options)
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.opened: list = []

    def _run(self) -> None:
        try:
            with self.loop:
                self.loop.run()
        except BaseException as error:
            self.failure = error

    def socket(self, kind: int, **options) -> zmq.Socket:
        socket = self.context.socket(kind)
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = int(PATIENCE_S * 1000)
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(self.address)
        self.opened.append(socket)
        return socket

    def worker(self, name: str = "w0") -> FakeWorker:
        worker = FakeWorker(self, name)
        self.opened.append(worker)
        worker.hello()
        return worker

    def stats(self):
        socket = self.socket(zmq.REQ)
        socket.send_multipart([b"GP1", b"s", encode(Stats())])
        reply = decode_reply(socket.recv_multipart()[2])
        socket.close()
        return reply.result

    def wait_for(self, condition) -> None:
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, "it never came to that"
            time.sleep(0.01)

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(PATIENCE_S)
        for thing in self.opened:
            thing.close()
        self.context.term()
        self.text.close()
        assert not self.thread.is_alive()
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def pool_of(tmp_path, world_of) -> Iterator:
    do_text = world_of.do_text
    with ExitStack() as stack:

        def make(**options) -> Pool:
            pool = Pool(tmp_path, do_text, **options)
            stack.callback(pool.close)
            return pool

        yield make


@pytest.fixture
def pool(pool_of) -> Pool:
    return pool_of()


def ask(socket: zmq.Socket, request, rid: bytes = b"1") -> None:
    socket.send_multipart([b"GP1", rid, encode(request)])


def take(socket: zmq.Socket) -> tuple[bytes, Reply]:
    magic, rid, body = socket.recv_multipart()
    assert magic == b"GP1"
    return rid, decode_reply(body)

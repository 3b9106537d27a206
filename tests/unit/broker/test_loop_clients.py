"""Property: every request of a client that is still there ends with a final reply, however slowly it reads and however quickly it
comes back; nobody's socket or file is replaced; no worker outlives a broker whose parent is gone; bindings are read back as they
were written. Tolerance: none; waits are limits for a test that hangs. Reason: these are what a client cannot see for itself.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq
from loop_kit import PATIENCE_S, FakeStore, FakeText, ask, take

from geist_pool.broker.events import Binding, Bindings, KeepBindings
from geist_pool.broker.loop import Loop
from geist_pool.broker.machine import Machine
from geist_pool.broker.ports import Store
from geist_pool.broker.wire import decode_request
from geist_pool.errors import BadRequest, ConfigError
from geist_pool.protocol import (
    Assign,
    CancelJob,
    ContextCreate,
    Done,
    Generate,
    GenerateDone,
    Info,
    Timings,
    Tokenize,
    Tokens,
    Usage,
    to_worker_decoder,
)


def test_slow_reader_still_hears_of_every_end(pool_of):
    """A stream that is too much, and answers to other requests that were waiting behind it."""
    pool = pool_of(kept_messages=50, send_hwm=10)
    worker = pool.worker()
    slow = pool.socket(zmq.DEALER, rcvhwm=1)
    ask(slow, Generate(text="a", max_tokens=900, stream=True), b"stream")
    assign = worker.hear(Assign)
    data, index = b"a" * 200_000, 0  # more than the kernel's buffers hold
    while not pool.loop._to_clients:
        worker.say(Tokens(assign.job, assign.attempt, index, (97,), data, None, index * len(data)))
        index += 1
        time.sleep(0.002)
        assert index < 3000, "it reads after all"
    ask(slow, Generate(text="b", max_tokens=5), b"waiting")
    for i in range(100):
        ask(slow, Info(), b"info%d" % i)  # of these, too, more than are kept
    pool.wait_for(lambda: pool.stats().requests.get("info", 0) == 100)
    while not worker.socket.poll(0) or not isinstance(to_worker_decoder.decode(worker.socket.recv()), CancelJob):
        worker.say(Tokens(assign.job, assign.attempt, index, (97,), data, None, index * len(data)))
        index += 1
        time.sleep(0.002)
        assert index < 6000, "nobody noticed"
    worker.say(Done(assign.job, assign.attempt, GenerateDone((), b"", "cancelled", None, None), Usage(), Timings()))
    ends: dict[bytes, str] = {}
    n_chunks = 0
    while len(ends) < 102:
        rid, reply = take(slow)
        if not reply.final:
            assert reply.result.index == n_chunks, "a gap in a stream"
            n_chunks += 1
        else:
            assert rid not in ends
            ends[rid] = reply.error.code if reply.error else "ok"
    assert ends[b"stream"] == ends[b"waiting"] == "cancelled" and set(ends.values()) == {"ok", "cancelled"}
    ask(slow, Info(), b"after")
    assert take(slow)[0] == b"after"


def test_client_of_a_fixed_identity_that_comes_back_within_one_batch(pool):
    """The broker is busy while the old connection ends and the new one asks: the new request is not the old client's."""
    worker = pool.worker()
    old = pool.socket(zmq.DEALER, routing_id=b"me")
    ask(old, Generate(text="old", max_tokens=9), b"old")
    job = worker.hear(Assign).job
    gate, held = threading.Event(), threading.Event()
    submit = pool.text.submit

    def wait(work) -> None:
        held.set()
        assert gate.wait(PATIENCE_S)
        submit(work)

    pool.text.submit = wait
    other = pool.socket(zmq.DEALER)
    ask(other, Tokenize(text="x"), b"t")
    assert held.wait(PATIENCE_S)
    old.close()
    time.sleep(0.2)
    new = pool.socket(zmq.DEALER, routing_id=b"me")
    ask(new, Info(), b"first")
    ask(new, Generate(text="new", max_tokens=1), b"new")
    time.sleep(0.2)
    pool.text.submit = submit
    gate.set()
    assert worker.hear(CancelJob).job == job
    worker.say(Done(job, 1, GenerateDone((), b"", "cancelled", None, None), Usage(), Timings()))
    worker.serve()
    assert [take(new)[0] for _ in range(2)] == [b"first", b"new"]


@pytest.mark.parametrize("where", ["address", "worker_address"])
@pytest.mark.parametrize("what", ["file", "listener"])
def test_what_lies_at_the_address_is_not_replaced(tmp_path, world_of, where, what):
    path = tmp_path / "x.ipc"
    addresses = {"address": f"ipc://{tmp_path}/c.ipc", "worker_address": f"ipc://{tmp_path}/w.ipc", where: f"ipc://{path}"}
    text = FakeText(world_of.do_text)
    with socket.socket(socket.AF_UNIX) as other:
        if what == "file":
            path.write_text("precious")
        else:
            other.bind(str(path))
            other.listen()
        with pytest.raises(ConfigError):
            Loop(Machine(world_of().config, random.Random(1)), text, FakeStore(), **addresses)
        assert path.read_text() == "precious" if what == "file" else path.is_socket()
    text.close()


def test_socket_that_nobody_listens_at_is_no_obstacle(tmp_path, world_of):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "c.ipc"))
    text = FakeText(world_of.do_text)
    addresses = {"address": f"ipc://{tmp_path}/c.ipc", "worker_address": f"ipc://{tmp_path}/w.ipc"}
    with Loop(Machine(world_of().config, random.Random(1)), text, FakeStore(), **addresses):
        assert (tmp_path / "c.ipc").is_socket()
    text.close()


def test_stopped_worker_does_not_outlive_the_broker_of_a_killed_parent(pool_of):
    read, write = os.pipe()
    pool = pool_of(parent_fd=read)
    worker = pool.worker()
    pool.wait_for(lambda: pool.stats().workers == 1)
    os.kill(worker.process.pid, signal.SIGSTOP)
    os.close(write)
    assert worker.process.wait(PATIENCE_S) == -signal.SIGKILL
    pool.thread.join(PATIENCE_S)
    os.close(read)


def test_workers_of_a_broker_that_is_stopped_in_order_are_the_supervisors(pool):
    worker = pool.worker()
    pool.wait_for(lambda: pool.stats().workers == 1)
    pool.loop.stop()
    pool.thread.join(PATIENCE_S)
    assert worker.process.poll() is None


# ---- bindings


def test_bindings_are_written_by_the_loop(pool):
    worker = pool.worker()
    dealer = pool.socket(zmq.DEALER)
    ask(dealer, ContextCreate(text="abc", name="n"))
    worker.serve()
    made = take(dealer)[1].result.context.id
    pool.wait_for(lambda: pool.store.bindings is not None)
    assert [(b.context, b.names) for b in pool.store.bindings.contexts] == [(made, ("n",))]


BINDINGS = Bindings((Binding("00112233aabb", ("a", "b"), True, 12.5),), ("ffffffffffff",))


def test_bindings_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "p.bindings"
    store = Store("test", "f16", str(path))
    assert store.read_bindings() is None
    for value in (Bindings(()), BINDINGS):
        store.keep_bindings(KeepBindings(value))
        assert store.read_bindings() == value
    assert [p.name for p in tmp_path.iterdir()] == ["p.bindings"] and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("cut", range(0, len(msgspec.msgpack.encode(BINDINGS)), 5))
def test_damaged_bindings_are_none(tmp_path, cut):
    path = tmp_path / "p.bindings"
    path.write_bytes(msgspec.msgpack.encode(BINDINGS)[:cut])
    assert Store("test", "f16", str(path)).read_bindings() is None


def test_bindings_that_cannot_be_written_leave_the_old_ones(tmp_path):
    path = tmp_path / "p.bindings"
    store = Store("test", "f16", str(path))
    store.keep_bindings(KeepBindings(BINDINGS))
    (tmp_path / ".p.bindings.tmp").mkdir()
    with pytest.raises(OSError):
        store.keep_bindings(KeepBindings(Bindings(())))
    assert store.read_bindings() == BINDINGS


def test_store_without_a_file_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("test", "f16")
    store.keep_bindings(KeepBindings(BINDINGS))
    assert store.read_bindings() is None and not list(Path.cwd().iterdir())


# ---- surrogates


@pytest.mark.parametrize(
    ("text", "byte"),
    [
        (rb"ab\ud800 lone", 2),
        (rb"\ud83d\ude00\udc00", 12),
        (rb"\ud83d", 0),
        (rb"\\\ud800\n", 2),
        (rb"\ud800\ud800\udc00", 0),
        (rb"\ud800A", 0),
        (b"x\xed\xa0\x80", 1),
    ],
)
def test_a_lone_surrogate_is_named_with_its_byte(text, byte):
    front = b'{"op":"tokenize","text":"'
    error = decode_request(front + text + b'"}')
    assert isinstance(error, BadRequest) and error.path == "body"
    assert "lone surrogate" in error.message and f"byte {len(front) + byte}" in error.message


@pytest.mark.parametrize("text", [rb"\\ud800", rb"\ud83d\ude00", rb"\u00e4", "\U0001f600".encode()])
def test_sound_text_is_taken(text):
    assert isinstance(decode_request(b'{"op":"tokenize","text":"' + text + b'"}'), Tokenize)


def test_other_broken_json_is_called_so():
    error = decode_request(b'{"op":"tokenize","text":"\\ud83d\\ude00"')
    assert isinstance(error, BadRequest) and "surrogate" not in error.message

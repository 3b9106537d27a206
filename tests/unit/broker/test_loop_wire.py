"""Property: over real sockets every kind of client (plain REQ with JSON, DEALER, REQ_CORRELATE) gets exactly its answers;
malformed and oversized messages are refused or dropped and harm nobody; clients and workers that vanish or stand still are
noticed, and the loop never blocks. Tolerance: none; waits are limits for a test that hangs, not measurements. Reason: a default
ROUTER loses messages without a word.
"""

from __future__ import annotations

import os
import random
import signal
import time

import msgspec
import pytest
import zmq
from loop_kit import GEOMETRY, PATIENCE_S, FakeStore, FakeText, ask, decode_reply, take

from geist_pool.broker.loop import Loop
from geist_pool.broker.machine import Machine
from geist_pool.errors import ConfigError
from geist_pool.protocol import (
    LIMITS,
    Assign,
    Cancel,
    CancelJob,
    ContextCreate,
    Done,
    Generate,
    GenerateDone,
    Hello,
    Info,
    Pong,
    Reply,
    Shutdown,
    Timings,
    Tokens,
    Usage,
    encode,
    to_worker_decoder,
)

# ---- kinds of clients


def test_req_with_json(pool):
    worker = pool.worker()
    req = pool.socket(zmq.REQ)
    req.send_multipart([b"GP1", b"a", b'{"op": "info"}'])
    magic, rid, body = req.recv_multipart()
    assert (magic, rid) == (b"GP1", b"a") and body.startswith(b"{")
    assert msgspec.json.decode(body)["result"]["pool"] == "test"
    req.send_multipart([b"GP1", b"b", b'{"op": "generate", "text": "hi", "max_tokens": 3}'])
    worker.serve()
    reply = msgspec.json.decode(req.recv_multipart()[2])
    assert reply["ok"] and reply["result"]["text"] == "aaa" and reply["result"]["bytes"] == "YWFh"
    req.send_multipart([b"GP1", b"c", b'{"op": "generate", "text": "hi", "stream": true}'])
    reply = msgspec.json.decode(req.recv_multipart()[2])
    assert (reply["error"]["code"], reply["error"]["path"]) == ("bad_request", "stream")


def test_req_correlate_and_relaxed(pool):
    req = pool.socket(zmq.REQ, req_correlate=1, req_relaxed=1)
    for i in range(3):
        ask(req, Info(), b"r%d" % i)
        rid, reply = take(req)
        assert rid == b"r%d" % i and reply.ok


def test_dealer_streams(pool):
    worker = pool.worker()
    dealer = pool.socket(zmq.DEALER)
    ask(dealer, Generate(text="hi", max_tokens=5, stream=True), b"g")
    worker.serve(chunks=5)
    replies = [take(dealer) for _ in range(6)]
    assert [rid for rid, _ in replies] == [b"g"] * 6
    assert [r.final for _, r in replies] == [False] * 5 + [True]
    assert "".join(r.result.text for _, r in replies[:5]) == replies[5][1].result.text == "aaaaa"


def test_an_envelope_of_several_frames_goes_back(pool):
    dealer = pool.socket(zmq.DEALER)
    front = [b"one", b"", b"three"]
    dealer.send_multipart([*front, b"GP1", b"x", encode(Info())])
    assert dealer.recv_multipart()[:5] == [*front, b"GP1", b"x"]


def test_many_requests_of_one_dealer(pool):
    dealer = pool.socket(zmq.DEALER)
    for i in range(500):
        ask(dealer, Info(), b"%d" % i)
    assert sorted(int(take(dealer)[0]) for _ in range(500)) == list(range(500))


# ---- malformed


@pytest.mark.parametrize(
    ("frames", "rid", "path"),
    [
        ([b"GP1"], b"", "id"),
        ([b"GP1", b""], b"", "id"),
        ([b"GP1", b"x" * 65, b"{}"], b"x" * 64, "id"),
        ([b"GP1", b"x"], b"x", None),
        ([b"GP1", b"x", b"{}", b"more"], b"x", None),
        ([b"GP1", b"x", b""], b"x", "body"),
        ([b"GP1", b"x", b"\xc1\xc1"], b"x", "body"),
        ([b"GP1", b"x", b"{"], b"x", "body"),
        ([b"GP1", b"x", b'{"op": "generate", "text": "\xff"}'], b"x", "body"),
        ([b"GP1", b"x", b'{"op": "tokenize", "text": "\\ud800 lone"}'], b"x", "body"),
        ([b"GP1", b"x", b'{"a":' * 5000], b"x", "body"),
        ([b"GP1", b"x", b'{"op": "nothing"}'], b"x", "op"),
        ([b"GP1", b"x", b'{"op": "score", "text": "a", "labels": ["b", [-1]]}'], b"x", "labels[1][0]"),
        ([b"GP1", b"x", b'{"op": "generate", "text": "a", "max_tokens": 0}'], b"x", "max_tokens"),
        ([b"GP1", b"x", b'{"op": "info", "colour": 1}'], b"x", None),
        ([b"GP1", b"x", msgspec.msgpack.encode([1, 2])], b"x", None),
    ],
)  # fmt: skip
def test_malformed_is_refused_with_its_place(pool, frames, rid, path):
    dealer = pool.socket(zmq.DEALER)
    dealer.send_multipart(frames)
    magic, got, body = dealer.recv_multipart()
    reply = msgspec.json.decode(body, type=Reply) if body.startswith(b"{") else decode_reply(body)
    assert magic == b"GP1" and got == rid
    assert reply.error is not None and (reply.error.code, reply.error.path) == ("bad_request", path)
    ask(dealer, Info(), b"after")
    assert take(dealer)[0] == b"after"


@pytest.mark.parametrize(
    "frames", [[b"hello"], [b""], [b"", b""], [b"x"] * 8 + [b"GP1", b"x", b"{}"], [b"x"] * 5000, [b"gp1", b"x", b"{}"]]
)
def test_what_cannot_be_answered_is_dropped_and_counted(pool, frames):
    dealer = pool.socket(zmq.DEALER)
    dealer.send_multipart(frames)
    ask(dealer, Info(), b"after")
    assert take(dealer)[0] == b"after"
    assert pool.loop.dropped_messages == 1


def test_oversized(pool):
    """A body above the limit is refused; above twice the limit the connection ends, and only that one."""
    dealer = pool.socket(zmq.DEALER)
    dealer.send_multipart([b"GP1", b"big", b"\0" * (LIMITS.body_bytes + 1)])
    rid, reply = take(dealer)
    assert rid == b"big" and (reply.error.code, reply.error.path) == ("bad_request", "body")
    other = pool.socket(zmq.DEALER, reconnect_ivl=-1)
    other.send_multipart([b"GP1", b"huge", b"\0" * (2 * LIMITS.body_bytes + 1)])
    other.rcvtimeo = 500
    with pytest.raises(zmq.Again):
        other.recv_multipart()
    ask(dealer, Info(), b"after")
    assert take(dealer)[0] == b"after"


def test_id_in_flight(pool):
    worker = pool.worker()
    dealer = pool.socket(zmq.DEALER)
    ask(dealer, Generate(text="a", max_tokens=1), b"same")
    ask(dealer, Generate(text="b", max_tokens=1), b"same")
    rid, reply = take(dealer)
    assert rid == b"same" and reply.error.path == "id"
    worker.serve()
    assert take(dealer)[1].ok


# ---- clients that vanish or stand still


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_gone_client_frees_its_worker(pool, kind):
    worker = pool.worker()
    client = pool.socket(kind)
    ask(client, Generate(text="a", max_tokens=50))
    assign = worker.hear(Assign)
    client.close()
    cancel = worker.hear(CancelJob)
    assert cancel.job == assign.job and not cancel.finish


def test_a_reused_descriptor_is_not_taken_for_the_old_client(pool):
    """Connections come and go, so descriptors are reused; the one that stays must keep its request."""
    worker = pool.worker()
    stays = pool.socket(zmq.DEALER)
    ask(stays, Generate(text="a", max_tokens=2), b"stays")
    worker.hear(Assign)
    for i in range(30):
        client = pool.socket(zmq.DEALER)
        ask(client, Info(), b"%d" % i)
        take(client)
        client.close()
    late = pool.socket(zmq.DEALER)
    ask(late, Generate(text="b", max_tokens=2), b"late")
    pool.wait_for(lambda: pool.stats().queue == 1)
    time.sleep(0.1)
    assert pool.stats().queue == 1 and pool.stats().workers_busy == 1


def test_slow_reader_loses_only_its_own(pool_of):
    """A client that does not read gets what fits; then its requests are cancelled, counted, and everyone else is served."""
    pool = pool_of(kept_messages=50, send_hwm=10)
    worker = pool.worker()
    slow = pool.socket(zmq.DEALER, rcvhwm=1)
    ask(slow, Generate(text="a", max_tokens=900, stream=True), b"slow")
    assign = worker.hear(Assign)
    index, data = 0, b"a" * 200_000  # more than the kernel's buffers hold
    while not worker.socket.poll(0) or not isinstance(to_worker_decoder.decode(worker.socket.recv()), CancelJob):
        worker.say(Tokens(assign.job, assign.attempt, index, (97,), data, None, index * len(data)))
        index += 1
        time.sleep(0.002)
        assert index < 3000, "nobody noticed"
        ask(quick := pool.socket(zmq.DEALER), Info(), b"quick")  # never kept waiting
        assert take(quick)[0] == b"quick"
        quick.close()
    worker.say(Done(assign.job, assign.attempt, GenerateDone((), b"", "cancelled", None, None), Usage(), Timings()))
    assert pool.stats().chunks_dropped > 0
    other = pool.socket(zmq.DEALER)
    ask(other, Generate(text="b", max_tokens=1), b"other")
    worker.serve()
    assert take(other)[1].ok


def test_cancel_over_the_wire(pool):
    dealer = pool.socket(zmq.DEALER)
    ask(dealer, Generate(text="a"), b"g")
    ask(dealer, Cancel(id="g"), b"c")
    replies = dict(take(dealer) for _ in range(2))
    assert replies[b"c"].result.found and replies[b"g"].error.code == "cancelled"


# ---- workers


def test_killed_worker_is_noticed_and_its_job_retried(pool):
    one = pool.worker("w0")
    dealer = pool.socket(zmq.DEALER)
    ask(dealer, Generate(text="a", max_tokens=2), b"g")
    assert one.hear(Assign).attempt == 1
    os.kill(one.process.pid, signal.SIGKILL)
    two = pool.worker("w1")
    assert two.serve().attempt == 2
    result = take(dealer)[1].result
    assert (result.worker, result.attempts, result.text) == ("w1", 2, "aa")
    assert pool.stats().workers_lost == 1


def test_silent_worker_is_killed(pool_of):
    pool = pool_of(heartbeat_s=0.05, worker_timeout_s=0.2)
    worker = pool.worker()
    assert worker.process.wait(PATIENCE_S) == -signal.SIGKILL
    pool.wait_for(lambda: pool.stats().workers == 0)


def test_worker_that_talks_nonsense_is_killed(pool):
    worker = pool.worker()
    pool.wait_for(lambda: pool.stats().workers == 1)
    worker.socket.send(b"\xc1 nonsense")
    assert worker.process.wait(PATIENCE_S) == -signal.SIGKILL
    pool.wait_for(lambda: pool.stats().workers == 0)


def test_stranger_on_the_workers_socket_is_ignored(pool):
    stranger = pool.context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.connect(pool.worker_address)
    stranger.send(b"nonsense")
    stranger.send(encode(Pong(1)))
    for pid in (1, os.getpid(), 1 << 22):  # not this user's (or the broker itself), and nobody's
        stranger.send(
            encode(
                Hello(
                    worker="w9", pid=pid, protocol=1, fingerprint="ab" * 32, numerics=1, image_format=1, geometry=GEOMETRY,
                    architecture="llama", n_vocab=256, n_ctx=1000, kv_type="f16", tier="scalar", threads=1, slots=1,
                )
            )
        )  # fmt: skip
    pool.wait_for(lambda: pool.loop.dropped_messages == 5)
    stranger.close()
    assert pool.stats().workers == 0


def test_second_life_of_a_worker_replaces_the_first(pool):
    one = pool.worker("w0")
    pool.wait_for(lambda: pool.stats().workers == 1)
    two = pool.worker("w0")
    assert one.process.wait(PATIENCE_S) == -signal.SIGKILL
    dealer = pool.socket(zmq.DEALER)
    ask(dealer, Generate(text="a", max_tokens=1))
    two.serve()
    assert take(dealer)[1].ok and pool.stats().workers == 1


# ---- beginning and end


def test_adoption_and_unlinking(pool):
    worker = pool.worker()
    pool.wait_for(lambda: pool.store.unlinked == ["/gp-00000000-000000000000-i1"])
    dealer = pool.socket(zmq.DEALER)
    ask(dealer, ContextCreate(text="abc", name="n"))
    worker.serve()
    assert take(dealer)[1].result.context.name == "n"


def test_stop_gives_everyone_the_last_word(pool):
    worker = pool.worker()
    dealer = pool.socket(zmq.DEALER)
    for i in range(3):
        ask(dealer, Generate(text="a", max_tokens=9), b"%d" % i)
    worker.hear(Assign)
    pool.wait_for(lambda: pool.stats().queue == 2)
    pool.loop.stop()
    assert {take(dealer)[1].error.code for _ in range(3)} == {"stopping"}
    worker.hear(Shutdown)
    pool.thread.join(PATIENCE_S)
    assert pool.store.emptied


def test_end_of_the_parent_ends_the_loop(pool_of):
    read, write = os.pipe()
    pool = pool_of(parent_fd=read)
    assert pool.stats().workers == 0
    os.close(write)
    pool.thread.join(PATIENCE_S)
    assert not pool.thread.is_alive()
    os.close(read)


def test_an_address_that_cannot_be_bound(tmp_path, world_of):
    text = FakeText(world_of.do_text)
    with pytest.raises(ConfigError):
        Loop(
            Machine(world_of().config, random.Random(1)), text, FakeStore(),
            address=f"ipc://{tmp_path}/no/such/directory.ipc", worker_address=f"ipc://{tmp_path}/w.ipc",
        )  # fmt: skip
    text.close()

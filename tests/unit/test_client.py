"""The client's promises, against a scripted ROUTER.

Property: every call ends exactly once, with its own reply or an error that says why; no reply reaches a request it was not made
for. Tolerance: none, messages are compared for equality. Reason: a client that mixes up answers or waits for ever makes every
promise of the pool worthless. Waits are bounded by time-outs, but no duration is asserted.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from geist_pool import protocol
from geist_pool.client import Client
from geist_pool.errors import BadRequest, NoAnswer, ProtocolError, StoreFull
from geist_pool.protocol import (
    Cancel,
    CancelResult,
    ErrorBody,
    Generate,
    GenerateChunk,
    GenerateResult,
    Message,
    Reply,
    Request,
    Score,
    Tokenize,
    TokenizeResult,
    Usage,
)

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

    def wait_for(self, kind: type[Request]) -> tuple[bytes, Request]:
        for _ in range(500):
            for rid, request in list(self.seen):
                if isinstance(request, kind):
                    return rid, request
            threading.Event().wait(0.01)
        raise AssertionError(f"no {kind.__name__} arrived")


@contextmanager
def serving(path: Path, handler: Handler) -> Iterator[Pool]:
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


def test_call_returns_the_typed_result_and_ids_are_unique(tmp_path: Path) -> None:
    with serving(tmp_path, echo) as pool, Client(pool.address, space="inn") as client:
        for text in ("a", "ab", ""):
            assert client.tokenize(text).tokens == tuple(text.encode())
        assert len({rid for rid, _ in pool.seen}) == 3
        assert all(request.space == "inn" for _, request in pool.seen)


def test_prompt_becomes_exactly_one_field(tmp_path: Path) -> None:
    def answer(rid: bytes, request: Request, send: Send) -> None:
        send(rid, Reply(ok=True, result=ANSWER))

    with serving(tmp_path, answer) as pool, Client(pool.address) as client:
        assert client.generate("x", context="c", stop=["."]) == ANSWER
        client.generate([1, 2])
        client.generate([{"role": "user", "content": "hey"}, Message("assistant", "ho")])
        client.generate(None, context="c")
        sent = [(r.text, r.tokens, r.messages) for _, r in pool.seen if isinstance(r, Generate)]
    message = (Message("user", "hey"), Message("assistant", "ho"))
    assert sent == [("x", None, None), (None, (1, 2), None), (None, None, message), (None, None, None)]


def test_errors_arrive_as_their_classes_with_all_they_carry(tmp_path: Path) -> None:
    def refuse(rid: bytes, request: Request, send: Send) -> None:
        body = ErrorBody("store_full", "no room", path="tokens", retry_after=1.5, data={"needed": 7})
        send(rid, Reply(ok=False, error=body))

    with serving(tmp_path, refuse) as pool, Client(pool.address) as client:
        with pytest.raises(StoreFull) as caught:
            client.create_context("x")
        assert (caught.value.message, caught.value.path, caught.value.retry_after) == ("no room", "tokens", 1.5)
        assert caught.value.data == {"needed": 7}


def test_wrong_requests_are_refused_before_they_travel(tmp_path: Path) -> None:
    with serving(tmp_path, echo) as pool, Client(pool.address) as client:
        with pytest.raises(BadRequest) as caught:
            client.generate("x", max_tokens=0)
        assert caught.value.path == "max_tokens"
        with pytest.raises(BadRequest) as caught:
            client.score("x", [])
        assert caught.value.path == "labels"
        with pytest.raises(BadRequest):
            client.tokenize("\ud800")
        with pytest.raises(BadRequest):
            client.generate([1.5, "x"])  # type: ignore[list-item]
        assert client.tokenize("ok").tokens == (111, 107)
        assert len(pool.seen) == 1


def test_timed_out_request_is_cancelled_and_its_late_reply_reaches_nobody(tmp_path: Path) -> None:
    held: list[bytes] = []

    def late(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Tokenize) and request.text == "slow":
            held.append(rid)
        elif isinstance(request, Tokenize):
            send(held[0], tokens_of("slow"))
            send(rid, tokens_of(request.text))

    with serving(tmp_path, late) as pool, Client(pool.address) as client:
        with pytest.raises(NoAnswer, match=r"within 0\.05 s"):
            client.tokenize("slow", timeout=0.05)
        cancel = pool.wait_for(Cancel)[1]
        assert isinstance(cancel, Cancel) and cancel.id.encode() == held[0]
        assert client.tokenize("fast").tokens == tuple(b"fast")
        assert client.discarded == 1


def test_no_pool_at_the_address(tmp_path: Path) -> None:
    with (
        Client(f"ipc://{tmp_path / 'nobody.ipc'}", connect_timeout=0.05) as client,
        pytest.raises(NoAnswer, match="there is no pool"),
    ):
        client.info()
    with pytest.raises(NoAnswer, match="no address"):
        Client("nonsense://x")


def test_pool_that_goes_away_is_noticed_and_one_that_comes_back_is_used(tmp_path: Path) -> None:
    arrived = threading.Event()

    def silent(rid: bytes, request: Request, send: Send) -> None:
        arrived.set()

    first = Pool(f"ipc://{tmp_path / 'pool.ipc'}", silent)
    with Client(first.address, timeout=None) as client:
        closer = threading.Thread(target=lambda: (arrived.wait(), first.close()))
        closer.start()
        with pytest.raises(NoAnswer, match="went away"):
            client.tokenize("x")
        closer.join()
        with serving(tmp_path, echo):
            assert client.tokenize("back").tokens == tuple(b"back")


def chunks(rid: bytes, request: Request, send: Send) -> None:
    if isinstance(request, Generate):
        send(rid, Reply(ok=True, result=GenerateChunk(0, (5,), "h"), final=False))
        send(rid, Reply(ok=True, result=GenerateChunk(1, (6,), "i"), final=False))
        send(rid, Reply(ok=True, result=ANSWER))
    else:
        echo(rid, request, send)


def test_stream_yields_chunks_then_the_result(tmp_path: Path) -> None:
    with serving(tmp_path, chunks) as pool, Client(pool.address) as client:
        with client.stream("x") as stream:
            assert [c.text for c in stream] == ["h", "i"]
            assert stream.result() == ANSWER
            assert list(stream) == []
        assert client.stream("x").result() == ANSWER  # unread chunks are read over
        request = pool.seen[0][1]
        assert isinstance(request, Generate) and request.stream


def test_two_streams_and_a_call_do_not_mix(tmp_path: Path) -> None:
    with serving(tmp_path, chunks) as pool, Client(pool.address) as client:
        one, two = client.stream("x"), client.stream("y")
        assert next(two).index == 0
        assert client.tokenize("call").tokens == tuple(b"call")
        assert [c.index for c in one] == [0, 1]
        assert [c.index for c in two] == [1]
        assert one.result() == two.result() == ANSWER


def test_abandoned_stream_is_cancelled(tmp_path: Path) -> None:
    def one_chunk(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Generate):
            send(rid, Reply(ok=True, result=GenerateChunk(0, (5,), "h"), final=False))

    with serving(tmp_path, one_chunk) as pool, Client(pool.address) as client:
        with client.stream("x") as stream:
            next(stream)
        cancel = pool.wait_for(Cancel)[1]
        assert isinstance(cancel, Cancel) and cancel.id == stream.id
        with pytest.raises(NoAnswer):
            next(stream)


def test_closing_client_cancels_what_is_in_flight(tmp_path: Path) -> None:
    with serving(tmp_path, lambda rid, request, send: None) as pool:
        client = Client(pool.address)
        stream = client.stream("x")
        client.close()
        client.close()
        cancel = pool.wait_for(Cancel)[1]
        assert isinstance(cancel, Cancel) and cancel.id == stream.id
        with pytest.raises(NoAnswer, match="closed"):
            client.info()


def test_cancel_names_the_request(tmp_path: Path) -> None:
    def found(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Cancel):
            send(rid, Reply(ok=True, result=CancelResult(found=True)))
            send(request.id.encode(), Reply(ok=True, result=msgspec.structs.replace(ANSWER, finish_reason="cancelled")))

    with serving(tmp_path, found) as pool, Client(pool.address) as client:
        stream = client.stream("x")
        stream.cancel()
        assert stream.result().finish_reason == "cancelled"


def test_unreadable_and_wrong_answers_are_protocol_errors(tmp_path: Path) -> None:
    def bad(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Tokenize):
            send(rid, b"\xc1")
        elif isinstance(request, Score):
            send(rid, tokens_of("x"))

    with serving(tmp_path, bad) as pool, Client(pool.address) as client:
        with pytest.raises(ProtocolError, match="cannot be understood"):
            client.tokenize("x")
        with pytest.raises(ProtocolError, match="TokenizeResult where ScoreResult"):
            client.score("x", [" a"])


def test_ctrl_c_leaves_a_usable_client(tmp_path: Path) -> None:
    def interrupt(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Generate):
            threading.Event().wait(0.05)  # until the client waits; one interrupted in sending would connect anew instead
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            echo(rid, request, send)

    with serving(tmp_path, interrupt) as pool, Client(pool.address) as client:
        with pytest.raises(KeyboardInterrupt):
            client.generate("x")
        rid = pool.seen[0][0]
        cancel = pool.wait_for(Cancel)[1]
        assert isinstance(cancel, Cancel) and cancel.id.encode() == rid
        assert client.tokenize("on").tokens == tuple(b"on")

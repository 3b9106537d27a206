"""The clients' promises, against a scripted ROUTER; each test runs with the blocking and with the asynchronous client.

Property: every call ends exactly once, with its own reply or an error that says why; no reply reaches a request it was not made
for; a request that lost its connection is sent again, the same bytes under the same id. Tolerance: none, messages are compared
for equality. Reason: a client that mixes up answers or waits for ever makes every promise of the pool worthless. Waits are
bounded by time-outs, but no duration is asserted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from geist_pool.errors import BadRequest, NoAnswer, ProtocolError, StoreFull
from geist_pool.protocol import (
    Cancel,
    CancelResult,
    ErrorBody,
    Generate,
    GenerateChunk,
    Message,
    Publish,
    Reply,
    Request,
    Sampling,
    Score,
    Tokenize,
)

Connect = Callable[..., Any]
Send = Callable[[bytes, Reply | bytes], None]


def test_call_returns_the_typed_result_and_ids_are_unique(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    with script.serving(tmp_path, script.echo) as pool, connect(pool.address, space="inn") as client:
        for text in ("a", "ab", ""):
            assert client.tokenize(text).tokens == tuple(text.encode())
        assert len({rid for rid, _ in pool.seen}) == 3
        assert all(request.space == "inn" for _, request in pool.seen)


def test_prompt_becomes_exactly_one_field(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    def answer(rid: bytes, request: Request, send: Send) -> None:
        send(rid, Reply(ok=True, result=script.answer))

    with script.serving(tmp_path, answer) as pool, connect(pool.address) as client:
        assert client.generate("x", context="c", stop=["."]) == script.answer
        client.generate([1, 2])
        client.generate([{"role": "user", "content": "hey"}, Message("assistant", "ho")])
        client.generate(None, context="c")
        sent = [(r.text, r.tokens, r.messages) for _, r in pool.seen if isinstance(r, Generate)]
    message = (Message("user", "hey"), Message("assistant", "ho"))
    assert sent == [("x", None, None), (None, (1, 2), None), (None, None, message), (None, None, None)]


def test_errors_arrive_as_their_classes_with_all_they_carry(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    def refuse(rid: bytes, request: Request, send: Send) -> None:
        body = ErrorBody("store_full", "no room", path="tokens", retry_after=1.5, data={"needed": 7})
        send(rid, Reply(ok=False, error=body))

    with script.serving(tmp_path, refuse) as pool, connect(pool.address) as client:
        with pytest.raises(StoreFull) as caught:
            client.create_context("x")
        assert (caught.value.message, caught.value.path, caught.value.retry_after) == ("no room", "tokens", 1.5)
        assert caught.value.data == {"needed": 7}


def test_wrong_requests_are_refused_before_they_travel(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    with script.serving(tmp_path, script.echo) as pool, connect(pool.address) as client:
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


def test_timed_out_request_is_cancelled_and_its_late_reply_reaches_nobody(
    tmp_path: Path, connect: Connect, script: SimpleNamespace
) -> None:
    held: list[bytes] = []

    def late(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Tokenize) and request.text == "slow":
            held.append(rid)
        elif isinstance(request, Tokenize):
            send(held[0], script.tokens_of("slow"))
            send(rid, script.tokens_of(request.text))

    with script.serving(tmp_path, late) as pool, connect(pool.address) as client:
        with pytest.raises(NoAnswer, match=r"within 0\.05 s"):
            client.tokenize("slow", timeout=0.05)
        cancel = pool.wait_for(Cancel)[1]
        assert isinstance(cancel, Cancel) and cancel.id.encode() == held[0]
        assert client.tokenize("fast").tokens == tuple(b"fast")
        assert client.discarded == 1


def test_no_pool_at_the_address(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    with (
        connect(f"ipc://{tmp_path / 'nobody.ipc'}", connect_timeout=0.05) as client,
        pytest.raises(NoAnswer, match="there is no pool"),
    ):
        client.info()
    with pytest.raises(NoAnswer, match="no address"), connect("nonsense://x") as client:
        client.info()


def test_pool_that_goes_away_is_noticed_and_one_that_comes_back_is_used(
    tmp_path: Path, connect: Connect, script: SimpleNamespace
) -> None:
    arrived = threading.Event()

    def silent(rid: bytes, request: Request, send: Send) -> None:
        arrived.set()

    first = script.Pool(f"ipc://{tmp_path / 'pool.ipc'}", silent)
    with connect(first.address, timeout=None, connect_timeout=0.3) as client:
        closer = threading.Thread(target=lambda: (arrived.wait(), first.close()))
        closer.start()
        with pytest.raises(NoAnswer, match="went away"):
            client.tokenize("x")
        closer.join()
        with script.serving(tmp_path, script.echo):
            assert client.tokenize("back").tokens == tuple(b"back")


@pytest.fixture
def chunks(script: SimpleNamespace) -> Callable[[bytes, Request, Send], None]:
    """Answers a generate by two chunks and the whole."""

    def answer(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Generate):
            send(rid, Reply(ok=True, result=GenerateChunk(0, (5,), "h"), final=False))
            send(rid, Reply(ok=True, result=GenerateChunk(1, (6,), "i"), final=False))
            send(rid, Reply(ok=True, result=script.answer))
        else:
            script.echo(rid, request, send)

    return answer


def test_stream_yields_chunks_then_the_result(
    tmp_path: Path, connect: Connect, script: SimpleNamespace, chunks: Callable[[bytes, Request, Send], None]
) -> None:
    with script.serving(tmp_path, chunks) as pool, connect(pool.address) as client:
        with client.stream("x") as stream:
            assert [c.text for c in stream] == ["h", "i"]
            assert stream.result() == script.answer
            assert list(stream) == []
        assert client.stream("x").result() == script.answer  # unread chunks are read over
        request = pool.seen[0][1]
        assert isinstance(request, Generate) and request.stream


def test_two_streams_and_a_call_do_not_mix(
    tmp_path: Path, connect: Connect, script: SimpleNamespace, chunks: Callable[[bytes, Request, Send], None]
) -> None:
    with script.serving(tmp_path, chunks) as pool, connect(pool.address) as client:
        one, two = client.stream("x"), client.stream("y")
        assert next(two).index == 0
        assert client.tokenize("call").tokens == tuple(b"call")
        assert [c.index for c in one] == [0, 1]
        assert [c.index for c in two] == [1]
        assert one.result() == two.result() == script.answer


def test_abandoned_stream_is_cancelled(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    def one_chunk(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Generate):
            send(rid, Reply(ok=True, result=GenerateChunk(0, (5,), "h"), final=False))

    with script.serving(tmp_path, one_chunk) as pool, connect(pool.address) as client:
        with client.stream("x") as stream:
            next(stream)
        cancel = pool.wait_for(Cancel)[1]
        assert isinstance(cancel, Cancel) and cancel.id == stream.id
        with pytest.raises(NoAnswer):
            next(stream)


def test_closing_client_cancels_what_is_in_flight(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    with script.serving(tmp_path, lambda rid, request, send: None) as pool:
        client = connect(pool.address)
        stream = client.stream("x")
        client.close()
        client.close()
        cancel = pool.wait_for(Cancel)[1]
        assert isinstance(cancel, Cancel) and cancel.id == stream.id
        with pytest.raises(NoAnswer, match="closed"):
            client.info()


def test_cancel_names_the_request(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    def found(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Cancel):
            send(rid, Reply(ok=True, result=CancelResult(found=True)))
            send(request.id.encode(), Reply(ok=True, result=msgspec.structs.replace(script.answer, finish_reason="cancelled")))

    with script.serving(tmp_path, found) as pool, connect(pool.address) as client:
        stream = client.stream("x")
        stream.cancel()
        assert stream.result().finish_reason == "cancelled"


def test_unreadable_and_wrong_answers_are_protocol_errors(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    def bad(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Tokenize):
            send(rid, b"\xc1")
        elif isinstance(request, Score):
            send(rid, script.tokens_of("x"))

    with script.serving(tmp_path, bad) as pool, connect(pool.address) as client:
        with pytest.raises(ProtocolError, match="cannot be understood"):
            client.tokenize("x")
        with pytest.raises(ProtocolError, match="TokenizeResult where ScoreResult"):
            client.score("x", [" a"])


# ---- sending again


def test_request_outlives_a_lost_connection_under_its_id(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    arrived = threading.Event()
    first = script.Pool(f"ipc://{tmp_path / 'pool.ipc'}", lambda rid, request, send: arrived.set())
    with connect(first.address, timeout=20, resend_after=3600) as client:  # only the break makes it send again
        seen = []

        def replace() -> None:
            arrived.wait()
            first.close()
            seen.append(script.Pool(first.address, script.echo))

        replacing = threading.Thread(target=replace)
        replacing.start()
        try:
            assert client.tokenize("again").tokens == tuple(b"again")
        finally:
            replacing.join()
            seen[0].close()
        assert first.seen == seen[0].seen  # the same id, the same request, once each
        assert len(first.seen) == 1


def test_connection_is_lost_no_more_often_than_retries(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    pool: list[Any] = []
    arrived = threading.Semaphore(0)
    count = []

    def mute(rid: bytes, request: Request, send: Send) -> None:
        count.append(rid)
        arrived.release()

    def replace() -> None:
        for _ in range(2):
            arrived.acquire()
            pool[-1].close()
            pool.append(script.Pool(pool[0].address, mute))

    pool.append(script.Pool(f"ipc://{tmp_path / 'pool.ipc'}", mute))
    replacing = threading.Thread(target=replace)
    replacing.start()
    try:
        with (
            connect(pool[0].address, retries=1, resend_after=3600) as client,
            pytest.raises(NoAnswer, match=r"went away before it answered$"),
        ):
            client.tokenize("x")
    finally:
        replacing.join()
        pool[-1].close()
    assert len(count) == 2 and len(set(count)) == 1


@pytest.mark.parametrize("refuse", [False, True])
def test_long_silence_sends_again_on_the_same_connection(
    tmp_path: Path, connect: Connect, script: SimpleNamespace, refuse: bool
) -> None:
    """Also where the pool refuses the second because the first is still at work: that is no answer."""
    seen: list[bytes] = []

    def slow(rid: bytes, request: Request, send: Send) -> None:
        seen.append(rid)
        if len(seen) == 2 and refuse:
            send(rid, Reply(ok=False, error=ErrorBody("bad_request", "in flight already", path="id")))
        if len(seen) == (3 if refuse else 2):
            send(rid, script.tokens_of("late"))

    with script.serving(tmp_path, slow) as pool, connect(pool.address, resend_after=0.05) as client:
        assert client.tokenize("late").tokens == tuple(b"late")
        assert len(set(seen)) == 1
        assert client.discarded == 0


def test_no_retries_means_never_twice(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    with script.serving(tmp_path, lambda rid, request, send: None) as pool:
        with connect(pool.address, retries=0, resend_after=0.01, timeout=0.3) as client, pytest.raises(NoAnswer, match="within"):
            client.tokenize("x")
        assert [type(r) for _, r in pool.seen[:2]] == [Tokenize, Cancel]


def test_stream_sent_again_gives_every_token_once(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    """The second pool cuts the same answer differently; the reader sees no repeat and no gap."""
    started = threading.Event()

    def half(rid: bytes, request: Request, send: Send) -> None:
        send(rid, Reply(ok=True, result=GenerateChunk(0, (5,), "h"), final=False))
        started.set()

    def whole(rid: bytes, request: Request, send: Send) -> None:
        send(rid, Reply(ok=True, result=GenerateChunk(0, (5, 6), "hi"), final=False))
        send(rid, Reply(ok=True, result=script.answer))

    first = script.Pool(f"ipc://{tmp_path / 'pool.ipc'}", half)
    with connect(first.address) as client:
        stream = client.stream("x", sampling=Sampling(temperature=1.0))
        assert next(stream) == GenerateChunk(0, (5,), "h")
        first.close()
        with script.serving(tmp_path, whole) as second:
            assert list(stream) == [GenerateChunk(1, (6,), "i")]
            assert stream.result() == script.answer
            assert first.seen == second.seen
            request = first.seen[0][1]
    assert isinstance(request, Generate) and request.sampling.seed is not None  # else the second answer would be another one


# ---- what travels


def test_open_seeds_are_drawn_here_and_greedy_ones_are_not(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    with script.serving(tmp_path, lambda rid, request, send: send(rid, Reply(ok=True, result=script.answer))) as pool:
        with connect(pool.address) as client:
            for sampling in (None, Sampling(), Sampling(temperature=1.0, seed=7), Sampling(temperature=1.0)):
                client.generate("x", sampling=sampling)
            client.generate("x", sampling=Sampling(temperature=1.0))
        seeds = [r.sampling.seed for _, r in pool.seen]
    assert seeds[:3] == [None, None, 7]
    assert seeds[3] != seeds[4] and None not in seeds[3:]


def test_options_are_the_wires_fields(tmp_path: Path, connect: Connect, script: SimpleNamespace) -> None:
    with script.serving(tmp_path, lambda rid, request, send: send(rid, Reply(ok=True, result=script.answer))) as pool:
        with connect(pool.address, space="inn") as client:
            client.generate(
                "x",
                context="c",
                max_tokens=3,
                stop=["a"],
                logprobs=0,
                ignore_eog=True,
                n=1,
                publish=Publish(name="next", ttl_s=5, pin=True),
                special=True,
                template_args={"enable_thinking": False},
                deadline_ms=1000,
            )
            with pytest.raises(TypeError):
                client.generate("x", temprature=1.0)
        assert [r for _, r in pool.seen] == [
            Generate(
                space="inn",
                text="x",
                context="c",
                max_tokens=3,
                stop=("a",),
                logprobs=0,
                ignore_eog=True,
                publish=Publish(name="next", ttl_s=5, pin=True),
                special=True,
                template_args={"enable_thinking": False},
                deadline_ms=1000,
            )
        ]

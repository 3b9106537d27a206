"""What both clients decide between a request and its answer, without a socket.

Property: whatever way an answer is cut and begun anew, its reader gets every token and every character once and in order; a
request is sent again when it should be and not otherwise. Tolerance: none. Reason: sending again must not be seen.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geist_pool import protocol
from geist_pool.client.calls import Calls
from geist_pool.client.wire import SEND_AGAIN, Desk, Reading
from geist_pool.errors import NoAnswer, ProtocolError
from geist_pool.protocol import GenerateChunk, GenerateResult, Reply, Sample, Timings, TokenLogprob, Usage

CALLS = Calls("default", lambda: 4)


def whole(tokens: tuple[int, ...], text: str, samples: tuple[Sample, ...] = ()) -> GenerateResult:
    logprobs = tuple(TokenLogprob(t, -float(t)) for t in tokens)
    return GenerateResult(
        usage=Usage(),
        timings=Timings(),
        text=text,
        raw=text.encode(),
        tokens=tokens,
        finish_reason="length",
        logprobs=logprobs,
        samples=samples,
    )


def cut(answer: GenerateResult | Sample, marks: list[tuple[int, int]], sample: int = 0) -> list[GenerateChunk]:
    """Chunks of an answer; marks are (tokens, characters) told so far, ascending."""
    out, at, chars = [], 0, 0
    assert answer.logprobs is not None
    for n, m in [*marks, (len(answer.tokens), len(answer.text))]:
        chunk = GenerateChunk(at, answer.tokens[at:n], answer.text[chars:m], answer.logprobs[at:n], sample)
        if chunk.tokens or chunk.text:
            out.append(chunk)
        at, chars = n, m
    return out


@st.composite
def cuts(draw: st.DrawFn, n_tokens: int, n_chars: int) -> list[tuple[int, int]]:
    """Text lags behind its tokens, and there is none before the first."""
    ns = sorted(draw(st.lists(st.integers(1, n_tokens), max_size=4))) if n_tokens else []
    ms = sorted(draw(st.lists(st.integers(0, n_chars), min_size=len(ns), max_size=len(ns))))
    return list(zip(ns, ms, strict=True))


def read(reading: Reading, chunks: list[GenerateChunk]) -> list[GenerateChunk]:
    for chunk in chunks:
        reading.take(Reply(ok=True, result=chunk, final=False))
    out = list(reading.ready)
    reading.ready.clear()
    return out


@given(st.data())
def test_stream_begun_anew_is_not_seen(data: st.DataObject) -> None:
    """FINDINGS row 14, the client's half. Cut off any number of times at any place, each time cut in other pieces; two samples,
    whose chunks come in turn; the last time perhaps only the final reply, as a pool gives from memory."""
    answers = [whole(tuple(range(n)), "abcdefghijkl"[: data.draw(st.integers(0, 12)) if n else 0]) for n in (7, 5)]
    samples = tuple(Sample(text=a.text, raw=a.raw, tokens=a.tokens, finish_reason="length", logprobs=a.logprobs) for a in answers)
    reading = Reading(CALLS.generate("x", stream=True))
    seen: list[GenerateChunk] = []
    for _ in range(data.draw(st.integers(0, 3))):
        for i, answer in enumerate(answers):
            pieces = cut(answer, data.draw(cuts(len(answer.tokens), len(answer.text))), i)
            seen += read(reading, pieces[: data.draw(st.integers(0, len(pieces)))])
    reading.take(Reply(ok=True, result=whole(answers[0].tokens, answers[0].text, samples)))
    seen += reading.ready
    assert reading.over
    for i, answer in enumerate(answers):
        mine = [c for c in seen if c.sample == i]
        at = 0
        for chunk in mine:
            assert chunk.index == at
            at += len(chunk.tokens)
        assert tuple(t for c in mine for t in c.tokens) == answer.tokens
        assert "".join(c.text for c in mine) == answer.text
        assert tuple(p for c in mine for p in c.logprobs or ()) == answer.logprobs


def test_chunks_of_one_sending_go_through_as_they_are() -> None:
    reading = Reading(CALLS.generate("x", stream=True))
    chunks = [GenerateChunk(0, (1,), ""), GenerateChunk(1, (2,), "ab"), GenerateChunk(2, (), "c")]
    assert read(reading, chunks) == chunks
    with pytest.raises(ProtocolError):
        reading.take(Reply(ok=True, result=protocol.CancelResult(found=True), final=False))


def test_steps_of_a_wait() -> None:
    desk = Desk("ipc://x", "p", retries=1, resend_after=10.0)
    flight = desk.open(CALLS.info().request)
    flight.mark_sent()
    wait = desk.wait(flight, 100.0, now=0.0)
    assert desk.step(wait, 0.0) == 10.0
    assert desk.step(wait, 10.0) is SEND_AGAIN  # long silence
    flight.mark_sent()
    assert desk.step(wait, 10.0) == 20.0  # twice as long
    desk.connection_lost()
    assert desk.step(wait, 11.0) is SEND_AGAIN
    flight.mark_sent()
    assert desk.step(wait, 95.0) is SEND_AGAIN
    assert desk.step(wait, 95.0) == 5.0  # the wait's own end is nearer
    with pytest.raises(NoAnswer, match="within 100 s"):
        desk.step(wait, 100.0)
    desk.connection_lost()
    with pytest.raises(NoAnswer, match="went away"):
        desk.step(wait, 96.0)


def test_a_request_that_was_not_sent_is_not_lost_and_not_cancelled() -> None:
    desk = Desk("ipc://x", "p", retries=2, resend_after=10.0)
    flight = desk.open(CALLS.info().request)
    desk.connection_lost()
    assert not flight.lost and desk.end(flight, "default") is None


def test_answer_that_came_before_the_connection_broke_is_handed_out() -> None:
    desk = Desk("ipc://x", "p", retries=0, resend_after=10.0)
    flight = desk.open(CALLS.info().request)
    flight.mark_sent()
    desk.take((protocol.MAGIC, flight.rid, protocol.encode(Reply(ok=True, result=protocol.CancelResult(True)))))
    desk.connection_lost()
    step = desk.step(desk.wait(flight, None, 0.0), 0.0)
    assert isinstance(step, Reply) and step.ok


def test_refusal_of_an_id_is_an_answer_where_the_request_is_about_ids() -> None:
    desk = Desk("ipc://x", "p", retries=2, resend_after=10.0)
    flight = desk.open(CALLS.story("nobody").request)
    flight.mark_sent()
    flight.mark_sent()
    error = protocol.ErrorBody("bad_request", "no such id", path="id")
    desk.take((protocol.MAGIC, flight.rid, protocol.encode(Reply(ok=False, error=error))))
    assert len(flight.inbox) == 1


def test_two_desks_share_no_id_and_frames_of_nobody_are_counted() -> None:
    one, two = (Desk("ipc://x", prefix, 0, 1.0) for prefix in ("a", "b"))
    ids = [desk.open(CALLS.info().request).rid for desk in (one, two) for _ in range(3)]
    assert len(set(ids)) == 6
    one.take((protocol.MAGIC, b"b-1", b"\x80"))
    one.take((b"GP0", b"a-1", b"\x80"))
    one.take((b"a-1",))
    assert one.discarded == 3

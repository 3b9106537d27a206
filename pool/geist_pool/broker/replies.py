"""From a worker's answer to a client's. Pure."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from geist_pool.broker.jobs import Job, Stream, Ticket
from geist_pool.broker.text_types import TextDone
from geist_pool.errors import GeistPoolError, Internal
from geist_pool.protocol import (
    ContextInfo,
    ContextResult,
    Done,
    ErrorBody,
    Generate,
    GenerateChunk,
    GenerateDone,
    GenerateResult,
    LabelScore,
    Reply,
    Result,
    ScoreDone,
    ScoreResult,
    Timings,
    TokenLogprob,
    Tokens,
    Usage,
    error_body,
)
from geist_pool.text.stream import ByteStream

Join = Literal["clean", "split"] | None


def ok(result: Result, *, final: bool = True) -> Reply:
    return Reply(ok=True, result=result, final=final)


def failed(error: GeistPoolError | ErrorBody) -> Reply:
    return Reply(ok=False, error=error if isinstance(error, ErrorBody) else error_body(error))


def timings(done: Timings, ticket: Ticket, job: Job, now: float) -> Timings:
    """The worker's times with the broker's own: microseconds."""
    queue = _microseconds(job.assigned - ticket.arrived)
    return msgspec.structs.replace(done, queue=queue, total=_microseconds(now - ticket.arrived))


def generate_result(job: Job, ticket: Ticket, done: Done, now: float) -> GenerateResult:
    """Raises Internal if the answer is not one to the request."""
    answer, request = done.result, job.request
    if not isinstance(answer, GenerateDone) or not isinstance(request, Generate):
        raise Internal(f"worker {job.worker} answered a request with a {type(done.result).__name__}")
    if answer.stop_index is not None and not 0 <= answer.stop_index < len(request.stop):
        raise Internal(f"worker {job.worker} names stop string {answer.stop_index} of {len(request.stop)}")
    whole = ByteStream()
    return GenerateResult(
        usage=done.usage,
        timings=timings(done.timings, ticket, job, now),
        worker=job.worker,
        attempts=job.attempt,
        context=None if job.base is None else job.base.id,
        join=_join(job),
        mismatch=job.mismatch,
        text=whole.feed(answer.data) + whole.finish(),
        raw=answer.data,
        tokens=answer.tokens,
        finish_reason=answer.finish_reason,
        stop=None if answer.stop_index is None else request.stop[answer.stop_index],
        seed=job.seed,
        logprobs=answer.logprobs,
    )


def score_result(job: Job, ticket: Ticket, done: Done, now: float) -> ScoreResult:
    """Raises Internal if the answer is not one to the request."""
    answer, text = done.result, job.text
    if not isinstance(answer, ScoreDone) or text is None:
        raise Internal(f"worker {job.worker} answered a request with a {type(done.result).__name__}")
    if [len(row) for row in answer.logprobs] != [len(label) for label in text.label_tokens]:
        raise Internal(f"worker {job.worker} scored other labels than it was given")
    labels = label_scores(text, answer.logprobs)
    return ScoreResult(
        usage=done.usage,
        timings=timings(done.timings, ticket, job, now),
        worker=job.worker,
        attempts=job.attempt,
        context=None if job.base is None else job.base.id,
        join=_join(job),
        mismatch=job.mismatch,
        labels=labels,
        best=_first_largest([label.sum for label in labels]),
        best_mean=_first_largest([label.mean for label in labels]),
    )


def label_scores(text: TextDone, logprobs: tuple[tuple[float, ...], ...]) -> tuple[LabelScore, ...]:
    """Sums are exact before they are rounded once, so that they do not depend on an order of addition."""
    joins: tuple[Join, ...] = text.label_joins or (None,) * len(text.label_tokens)
    return tuple(
        LabelScore(tokens=tokens, logprobs=row, sum=math.fsum(row), mean=math.fsum(row) / len(row), join=join)
        for tokens, row, join in zip(text.label_tokens, logprobs, joins, strict=True)
    )


def context_result(job: Job, ticket: Ticket, info: ContextInfo, done: Done, now: float) -> ContextResult:
    """For the context that a job has just made; who joined the job later has computed nothing."""
    return ContextResult(
        context=info,
        created=ticket.created,
        usage=done.usage if ticket.created else Usage(reused=info.n_tokens),
        timings=timings(done.timings, ticket, job, now),
        worker=job.worker,
        base=info.parent,
        join=_join(job),
        mismatch=job.mismatch,
    )


def existing_result(info: ContextInfo, ticket: Ticket, join: Join, now: float) -> ContextResult:
    return ContextResult(
        context=info,
        created=False,
        usage=Usage(reused=info.n_tokens),
        timings=Timings(total=_microseconds(now - ticket.arrived)),
        base=info.parent,
        join=join,
    )


def next_chunk(stream: Stream, message: Tokens) -> GenerateChunk | None:
    """What of a worker's message is new to the client; None if nothing is. Raises Internal where something is missing."""
    n_tokens, n_bytes = len(stream.tokens), len(stream.data)
    if message.index > n_tokens or message.byte_index > n_bytes:
        raise Internal(
            f"the stream goes on at token {message.index}, byte {message.byte_index}; "
            f"it had come to token {n_tokens}, byte {n_bytes}"
        )
    return _advance(stream, message.index, message.tokens, message.byte_index, message.data, message.logprobs, last=False)


def at_least(stream: Stream, answer: GenerateDone) -> GenerateDone:
    """The answer; where a repeated attempt was cut short before it came to what the client has seen, what that was."""
    if len(answer.tokens) >= len(stream.tokens) or answer.finish_reason not in ("cancelled", "deadline"):
        return answer
    return msgspec.structs.replace(
        answer,
        tokens=tuple(stream.tokens),
        data=bytes(stream.data),
        logprobs=None if answer.logprobs is None else tuple(stream.logprobs),
    )


def last_chunk(stream: Stream, answer: GenerateDone) -> GenerateChunk | None:
    """What the chunks still lack of the whole answer, so that together they are that answer."""
    return _advance(stream, 0, answer.tokens, 0, answer.data, answer.logprobs, last=True)


def _advance(
    stream: Stream,
    index: int,
    tokens: tuple[int, ...],
    byte_index: int,
    data: bytes,
    logprobs: tuple[TokenLogprob, ...] | None,
    *,
    last: bool,
) -> GenerateChunk | None:
    n_known = len(stream.tokens)
    new_tokens = tokens[n_known - index :]
    new_data = data[len(stream.data) - byte_index :]
    new_logprobs = None if logprobs is None else logprobs[n_known - index :]
    stream.tokens += new_tokens
    stream.data += new_data
    stream.logprobs += new_logprobs or ()
    text = stream.text.feed(new_data)
    if last:
        text += stream.text.finish()
    if not new_tokens and not text:
        return None
    return GenerateChunk(index=n_known, tokens=new_tokens, text=text, logprobs=new_logprobs)


def _join(job: Job) -> Join:
    return None if job.text is None else job.text.join


def _first_largest(values: list[float]) -> int:
    return max(range(len(values)), key=lambda i: (values[i], -i))


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))

"""From a worker's answer to a client's. Pure."""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import msgspec

from geist_pool.broker.jobs import Answer, Job, Stream, Ticket
from geist_pool.broker.text_types import TextDone
from geist_pool.errors import Cancelled, DeadlineExceeded, GeistPoolError, Internal
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
    Sample,
    SampleDone,
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


def last_word(job: Job, ticket: Ticket, error: GeistPoolError | ErrorBody, now: float) -> Reply:
    """The reply that ends a request early: an answer that is whole but for its context, what was streamed of one that was called
    off, else the error."""
    body = error if isinstance(error, ErrorBody) else error_body(error)
    if job.answer is not None:
        return ok(generate_result(job, ticket, job.answer, now, publish_error=body))
    if body.code in (Cancelled.code, DeadlineExceeded.code) and any(s.tokens for s in job.streams or ()):
        return ok(streamed_result(job, ticket, "cancelled" if body.code == Cancelled.code else "deadline", body, now))
    return failed(body)


def timings(done: Timings, ticket: Ticket, assigned: float, now: float) -> Timings:
    """The worker's times with the broker's own: microseconds."""
    queue = _microseconds(assigned - ticket.arrived)
    return msgspec.structs.replace(done, queue=queue, total=_microseconds(now - ticket.arrived))


def all_samples(answer: GenerateDone) -> list[GenerateDone | SampleDone]:
    return [answer, *answer.more]


def check_samples(job: Job, answer: GenerateDone) -> None:
    """Raises Internal if this is not an answer to the request."""
    request = job.request
    assert isinstance(request, Generate)
    if len(answer.more) != request.n - 1:
        raise Internal(f"worker {job.worker} drew {1 + len(answer.more)} samples of {request.n}")
    for sample in all_samples(answer):
        if sample.stop_index is not None and not 0 <= sample.stop_index < len(request.stop):
            raise Internal(f"worker {job.worker} names stop string {sample.stop_index} of {len(request.stop)}")


def text_of(data: bytes) -> str:
    """With U+FFFD for what is no UTF-8."""
    whole = ByteStream()
    return whole.feed(data) + whole.finish()


def generate_result(
    job: Job,
    ticket: Ticket,
    answer: Answer,
    now: float,
    *,
    published: ContextInfo | None = None,
    publish_error: ErrorBody | None = None,
) -> GenerateResult:
    """`check_samples` has been called."""
    done, request = answer.message.result, job.request
    assert isinstance(done, GenerateDone) and isinstance(request, Generate)
    samples = tuple(
        Sample(
            text=text_of(s.data),
            raw=s.data,
            tokens=s.tokens,
            finish_reason=s.finish_reason,
            stop=None if s.stop_index is None else request.stop[s.stop_index],
            logprobs=s.logprobs,
        )
        for s in all_samples(done)
    )
    first = samples[0]
    return GenerateResult(
        usage=answer.message.usage,
        timings=timings(answer.message.timings, ticket, answer.assigned, now),
        worker=answer.worker,
        attempts=answer.attempts,
        context=answer.context,
        join=_join(job),
        mismatch=job.mismatch,
        text=first.text,
        raw=first.raw,
        tokens=first.tokens,
        finish_reason=first.finish_reason,
        stop=first.stop,
        seed=job.seed,
        logprobs=first.logprobs,
        samples=samples if request.n > 1 else (),
        published=published,
        publish_error=publish_error,
    )


def streamed_result(
    job: Job, ticket: Ticket, reason: Literal["cancelled", "deadline"], why: ErrorBody, now: float
) -> GenerateResult:
    """What has been streamed so far, as the whole answer: nobody can say more."""
    request = job.request
    assert isinstance(request, Generate) and job.streams
    done = tuple(
        SampleDone(
            tokens=tuple(s.tokens),
            data=bytes(s.data),
            finish_reason=reason,
            stop_index=None,
            logprobs=None if request.logprobs is None else tuple(s.logprobs),
        )
        for s in job.streams
    )
    first = done[0]
    result = GenerateDone(first.tokens, first.data, reason, None, first.logprobs, more=done[1:])
    generated = sum(len(s.tokens) for s in done)
    message = Done(job.key, job.attempt, result, Usage(generated=generated), Timings())
    answer = Answer(message, job.worker or "", job.attempt, job.assigned, None if job.base is None else job.base.id)
    error = None if request.publish is None else why
    return generate_result(job, ticket, answer, now, publish_error=error)


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
        timings=timings(done.timings, ticket, job.assigned, now),
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


def context_result(job: Job, ticket: Ticket, info: ContextInfo, done: Done, now: float, *, new: bool) -> ContextResult:
    """For the context that a job has just made, if it is new; who joined the job later has computed nothing."""
    return ContextResult(
        context=info,
        created=ticket.created and new,
        usage=done.usage if ticket.created else Usage(reused=info.n_tokens),
        timings=timings(done.timings, ticket, job.assigned, now),
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


def next_chunk(streams: list[Stream], message: Tokens) -> GenerateChunk | None:
    """What of a worker's message is new to the client; None if nothing is. Raises Internal where something is missing."""
    if not 0 <= message.sample < len(streams):
        raise Internal(f"a stream of {len(streams)} samples goes on with sample {message.sample}")
    stream = streams[message.sample]
    n_tokens, n_bytes = len(stream.tokens), len(stream.data)
    if message.index > n_tokens or message.byte_index > n_bytes:
        raise Internal(
            f"the stream goes on at token {message.index}, byte {message.byte_index}; "
            f"it had come to token {n_tokens}, byte {n_bytes}"
        )
    part = _Part(message.index, message.tokens, message.byte_index, message.data, message.logprobs, message.sample)
    return _advance(stream, part, last=False)


def at_least(streams: list[Stream], answer: GenerateDone) -> GenerateDone:
    """The answer; where a repeated attempt was cut short before it came to what the client has seen, what that was."""
    first = _at_least(streams[0], answer)
    more = tuple(_at_least(stream, sample) for stream, sample in zip(streams[1:], answer.more, strict=True))
    if first is not answer:  # what was published is the context of a shorter text than the client has
        first = msgspec.structs.replace(first, published=None)
    return msgspec.structs.replace(first, more=more)


_Sample = TypeVar("_Sample", GenerateDone, SampleDone)


def _at_least(stream: Stream, sample: _Sample) -> _Sample:
    if len(sample.tokens) >= len(stream.tokens) or sample.finish_reason not in ("cancelled", "deadline"):
        return sample
    return msgspec.structs.replace(
        sample,
        tokens=tuple(stream.tokens),
        data=bytes(stream.data),
        logprobs=None if sample.logprobs is None else tuple(stream.logprobs),
    )


def last_chunks(streams: list[Stream], answer: GenerateDone) -> list[GenerateChunk]:
    """What the chunks still lack of the whole answer, so that together they are that answer."""
    chunks: list[GenerateChunk] = []
    for i, (stream, sample) in enumerate(zip(streams, all_samples(answer), strict=True)):
        chunk = _advance(stream, _Part(0, sample.tokens, 0, sample.data, sample.logprobs, i), last=True)
        if chunk is not None:
            chunks.append(chunk)
    return chunks


def chunks_so_far(streams: list[Stream], *, with_logprobs: bool, whole: bool) -> list[GenerateChunk]:
    """Everything that has been streamed, a chunk for each sample, for a client that asks again. whole: nothing will follow."""
    return [
        GenerateChunk(
            index=0,
            tokens=tuple(s.tokens),
            text=text_of(bytes(s.data)) if whole else ByteStream().feed(bytes(s.data)),
            logprobs=tuple(s.logprobs) if with_logprobs else None,
            sample=i,
        )
        for i, s in enumerate(streams)
        if s.tokens
    ]


def chunks_of(result: GenerateResult) -> list[GenerateChunk]:
    """A whole answer as a stream of one chunk for each sample."""
    samples: list[Sample | GenerateResult] = [*result.samples] or [result]
    return [
        GenerateChunk(index=0, tokens=s.tokens, text=s.text, logprobs=s.logprobs, sample=i)
        for i, s in enumerate(samples)
        if s.tokens or s.text
    ]


class _Part(msgspec.Struct, frozen=True):
    """Tokens and bytes of one sample, and where in it they stand."""

    index: int
    tokens: tuple[int, ...]
    byte_index: int
    data: bytes
    logprobs: tuple[TokenLogprob, ...] | None
    sample: int


def _advance(stream: Stream, part: _Part, *, last: bool) -> GenerateChunk | None:
    n_known = len(stream.tokens)
    new_tokens = part.tokens[n_known - part.index :]
    new_data = part.data[len(stream.data) - part.byte_index :]
    new_logprobs = None if part.logprobs is None else part.logprobs[n_known - part.index :]
    stream.tokens += new_tokens
    stream.data += new_data
    stream.logprobs += new_logprobs or ()
    text = stream.text.feed(new_data)
    if last:
        text += stream.text.finish()
    if not new_tokens and not text:
        return None
    return GenerateChunk(index=n_known, tokens=new_tokens, text=text, logprobs=new_logprobs, sample=part.sample)


def _join(job: Job) -> Join:
    return None if job.text is None else job.text.join


def _first_largest(values: list[float]) -> int:
    return max(range(len(values)), key=lambda i: (values[i], -i))


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))

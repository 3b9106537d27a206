"""A job as a sequence of passes.

    Assign ─► attach ─► prefill, a chunk a pass ─┬─► decode, a token a pass ─┐
                                                 ├─► score, a label a pass  ─┼─► Done | Failed
                                                 └─► publish                ─┘

`step` runs one pass and says whether the job is over. Between passes a job can be cancelled. Whatever goes wrong inside becomes
its Failed: a job never ends without a word. Whoever ends it calls `close`, after which the session is as new and the contexts are
free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Literal

from geist_pool.engine import NUMERICS, Image, Model, Session
from geist_pool.errors import Cancelled, DeadlineExceeded, GeistPoolError, Internal
from geist_pool.protocol import (
    Assign,
    CreateDone,
    CreateWork,
    Done,
    Failed,
    FromWorker,
    GenerateDone,
    GenerateWork,
    ScoreDone,
    ScoreWork,
    Timings,
    TokenLogprob,
    Tokens,
    Usage,
    error_body,
)
from geist_pool.store.shm import Publication
from geist_pool.text.stream import StopMatcher
from geist_pool.worker.contexts import ContextCache
from geist_pool.worker.faults import Faults

_log = logging.getLogger("geist_pool.worker.jobs")

FinishReason = Literal["stop", "length", "cancelled", "deadline"]
Result = CreateDone | GenerateDone | ScoreDone
Passes = Generator[None, None, Result]
"""One pass up to each yield; the result in the end."""


class Room:
    """What all jobs of a worker share: pool, model, mapped contexts, the way out, and the faults asked for."""

    def __init__(
        self, pool: str, model: Model, contexts: ContextCache, chunk: int, faults: Faults, send: Callable[[FromWorker], None]
    ) -> None:
        self.pool = pool
        self.model = model
        self.contexts = contexts
        self.chunk = chunk  # most tokens of a prefill pass
        self.faults = faults
        self.send = send


class Job:
    """One Assign on one session, which is the job's alone until `close`."""

    def __init__(self, assign: Assign, session: Session, room: Room) -> None:
        self.id = assign.job
        self.assign = assign
        self.session = session
        self.room = room
        self._nanoseconds: dict[str, int] = {}
        self._prefilled = 0
        self._generated = 0
        self._attached = False
        self._answer: _Answer | None = None
        self._passes = self._run()

    def step(self) -> Done | Failed | None:
        """Runs one pass; the job's last word if it was the last one."""
        try:
            next(self._passes)
        except StopIteration as end:
            return self._done(end.value)
        except GeistPoolError as error:
            return self._failed(error)
        except Exception as error:
            _log.exception("job %s failed", self.id)
            return self._failed(Internal(f"{type(error).__name__} in a worker: {error}"))
        return None

    def cancel(self, reason: Literal["cancelled", "deadline"], *, finish: bool) -> Done | Failed:
        """Ends the job between passes: with what it has if that is wanted and it generates, else as failed."""
        if finish and isinstance(self.assign.work, GenerateWork):
            answer = self._answer or _Answer(self, self.assign.work)
            return self._done(answer.finish(reason))
        if reason == "cancelled":
            return self._failed(Cancelled("the request was cancelled"))
        return self._failed(DeadlineExceeded("the request's deadline passed"))

    def refuse(self, error: GeistPoolError) -> Failed:
        """Ends the job with this error."""
        return self._failed(error)

    def close(self) -> None:
        """Resets the session and frees the contexts. Allowed twice."""
        self._passes.close()
        self.session.reset()
        if self._attached:
            self._attached = False
            self.room.contexts.release(self.assign.chain)

    # ---- passes

    def _run(self) -> Passes:
        work = self.assign.work
        yield from self._attach()
        yield from self._prefill(work.tokens)
        if isinstance(work, CreateWork):
            return self._publish(work)
        if isinstance(work, GenerateWork):
            return (yield from self._generate(work))
        return (yield from self._score(work))

    def _attach(self) -> Generator[None, None, None]:
        chain = self.assign.chain
        if not chain:
            return
        self.room.faults("attach")
        with self._clock("attach"):
            found = self.room.contexts.acquire(chain)
            self._attached = True
            self.session.attach(found.image, found.kv)
        if self.session.position != chain[-1].n_tokens:
            raise Internal(f"context {chain[-1].id} has {self.session.position} tokens instead of {chain[-1].n_tokens}")
        yield

    def _prefill(self, tokens: tuple[int, ...]) -> Generator[None, None, None]:
        for start in range(0, len(tokens), self.room.chunk):
            self.room.faults("prefill")
            chunk = tokens[start : start + self.room.chunk]
            with self._clock("prefill"):
                self.session.prefill(chunk)
            self._prefilled += len(chunk)
            yield

    def _publish(self, work: CreateWork) -> CreateDone:
        ref, session, model = work.grant.ref, self.session, self.room.model
        if session.position != ref.n_tokens:
            raise Internal(f"context {ref.id} was granted for {ref.n_tokens} tokens and has {session.position}")
        self.room.faults("publish")
        with (
            self._clock("publish"),
            Publication(
                ref,
                work.grant.envelope,
                model.geometry(session.kv_type),
                pool=self.room.pool,
                fingerprint=model.fingerprint,
                numerics=NUMERICS,
            ) as publication,
        ):
            if publication.kv is not None:
                session.snapshot_blocks(ref.first_block, ref.n_blocks, publication.kv)
            session.snapshot_thin(publication.image)
            image_id = Image.inspect(publication.image).id
            self.room.faults("seal")
            publication.seal()
        return CreateDone(image_id=image_id)

    def _generate(self, work: GenerateWork) -> Generator[None, None, GenerateDone]:
        session = self.session
        session.set_sampler(work.sampling)
        answer = self._answer = _Answer(self, work)
        while True:
            self.room.faults("decode")
            with self._clock("decode"):
                token = session.sample()
                if token in work.eog:
                    return answer.finish("stop")
                answer.add(token)
                self._generated += 1
                if answer.stopped:
                    return answer.finish("stop")
                if len(answer.tokens) == work.max_tokens or session.position == session.n_ctx:
                    return answer.finish("length")
                session.decode(token)
            yield

    def _score(self, work: ScoreWork) -> Generator[None, None, ScoreDone]:
        scores: list[tuple[float, ...]] = []
        for i, label in enumerate(work.labels):
            if i:
                yield
            self.room.faults("score")
            with self._clock("score"):
                scores.append(tuple(self.session.score(label).tolist()))
            self._generated += len(label)
        return ScoreDone(logprobs=tuple(scores))

    # ---- last words

    def _done(self, result: Result) -> Done:
        usage = Usage(reused=self._reused(), prefilled=self._prefilled, generated=self._generated)
        timings = Timings(**{name: ns // 1000 for name, ns in self._nanoseconds.items()})
        return Done(job=self.id, attempt=self.assign.attempt, result=result, usage=usage, timings=timings)

    def _failed(self, error: GeistPoolError) -> Failed:
        return Failed(job=self.id, attempt=self.assign.attempt, error=error_body(error))

    def _reused(self) -> int:
        return self.assign.chain[-1].n_tokens if self._attached else 0

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._nanoseconds[phase] = self._nanoseconds.get(phase, 0) + time.perf_counter_ns() - start


class _Answer:
    """What a generate job has said so far, and what of it has been sent."""

    def __init__(self, job: Job, work: GenerateWork) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self._job = job
        self._work = work
        self._matcher = StopMatcher(work.stop)
        self._data = bytearray()
        self._stop_index: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._stop_index is not None

    def add(self, token: int) -> None:
        """The session's next token, before it is taken in: its log-probability is among the pending ones."""
        logprob = self._logprob(token) if self._work.logprobs is not None else None
        data, self._stop_index = self._matcher.feed(self._job.room.model.token_bytes(token))
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        self._emit((token,), data, None if logprob is None else (logprob,))

    def finish(self, reason: FinishReason) -> GenerateDone:
        """The whole answer; bytes held back for a stop string that did not come belong to it."""
        held = self._matcher.finish()
        if held:
            self._emit((), held, None)
        return GenerateDone(
            tokens=tuple(self.tokens),
            data=bytes(self._data),
            finish_reason=reason,
            stop_index=self._stop_index,
            logprobs=tuple(self.logprobs) if self._work.logprobs is not None else None,
        )

    def _emit(self, tokens: tuple[int, ...], data: bytes, logprobs: tuple[TokenLogprob, ...] | None) -> None:
        at = len(self._data)
        self._data += data
        if self._work.stream:
            job = self._job
            index = len(self.tokens) - len(tokens)
            job.room.send(Tokens(job.id, job.assign.attempt, index, tokens, data, logprobs, at))

    def _logprob(self, token: int) -> TokenLogprob:
        session, k = self._job.session, self._work.logprobs
        value = float(session.logprobs((token,))[0])
        if not k:
            return TokenLogprob(token, value)
        ids, values = session.top(min(k, self._job.room.model.info.n_vocab))
        return TokenLogprob(token, value, tuple(zip(ids.tolist(), values.tolist(), strict=True)))

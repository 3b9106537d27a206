"""A job as a sequence of passes.

    Assign ─► attach ─► prefill, a chunk a pass ─┬─► decode, a token a pass, sample after sample ─► (publish) ─┐
                                                 ├─► score, a label a pass ───────────────────────────────────┼─► Done | Failed
                                                 ├─► publish ─────────────────────────────────────────────────┤
                                                 └─► save: write a file, a piece a pass ──────────────────────┤
              └► load: read a file, a piece a pass ─► publish ────────────────────────────────────────────────┘

`step` runs one pass and says whether the job is over. Between passes a job can be cancelled. Whatever goes wrong inside becomes
its Failed: a job never ends without a word. Whoever ends it calls `close`, after which the session is as new and the contexts are
free.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Final, Literal

import msgspec
from msgspec import Struct

from geist_pool.engine import NUMERICS, Image, Model, Session
from geist_pool.errors import Cancelled, DeadlineExceeded, GeistPoolError, ImageDamaged, ImageMismatch, Internal
from geist_pool.protocol import (
    Assign,
    ContextRef,
    CreateDone,
    CreateWork,
    Done,
    ErrorBody,
    Failed,
    FromWorker,
    GenerateDone,
    GenerateWork,
    Grant,
    LoadDone,
    LoadWork,
    SampleDone,
    Sampling,
    SaveDone,
    SaveWork,
    ScoreDone,
    ScoreWork,
    Timings,
    Usage,
    error_body,
)
from geist_pool.store import files, layout
from geist_pool.store.shm import Publication
from geist_pool.worker.answer import Answer, Ending, FinishReason, n_recalled
from geist_pool.worker.contexts import ContextCache
from geist_pool.worker.faults import Faults
from geist_pool.worker.gauges import Gauges

_log = logging.getLogger("geist_pool.worker.jobs")

UNSET: Final = Sampling(repeat_last_n=0)  # the sampler of a new session
Result = CreateDone | GenerateDone | ScoreDone | SaveDone | LoadDone
Passes = Generator[None, None, Result]
"""One pass up to each yield; the result in the end."""


class _Kept(Struct, frozen=True):
    """What became of an answer that was to be kept; nothing at all if its text ends inside a token."""

    ref: ContextRef | None = None
    image_id: int = 0
    error: ErrorBody | None = None


class Room:
    """What all jobs of a worker share: pool, model, mapped contexts, counters, the way out, and the faults asked for."""

    def __init__(
        self,
        pool: str,
        model: Model,
        contexts: ContextCache,
        chunk: int,
        faults: Faults,
        gauges: Gauges,
        send: Callable[[FromWorker], None],
    ) -> None:
        self.pool = pool
        self.model = model
        self.contexts = contexts
        self.chunk = chunk  # most tokens of a prefill pass
        self.faults = faults
        self.gauges = gauges
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
        self._loaded = 0
        self._answers: list[Answer] = []
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
            return self._done(self._said(self.assign.work, reason))
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
        if isinstance(work, LoadWork):
            return (yield from self._load(work))
        yield from self._attach()
        if isinstance(work, SaveWork):
            return (yield from self._save(work))
        yield from self._prefill(work.tokens)
        if isinstance(work, CreateWork):
            return self._create(work)
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
        for n in self._take_in(self.session, tokens):
            self._prefilled += n
            yield

    def _take_in(self, session: Session, tokens: tuple[int, ...]) -> Iterator[int]:
        """A chunk a pass; how many tokens that were."""
        for start in range(0, len(tokens), self.room.chunk):
            self.room.faults("prefill")
            chunk = tokens[start : start + self.room.chunk]
            with self._clock("prefill"):
                session.prefill(chunk)
            self.room.gauges.passes += 1
            self.room.gauges.tokens_prefilled += len(chunk)
            yield len(chunk)

    def _create(self, work: CreateWork) -> CreateDone:
        self.room.faults("publish")
        return CreateDone(image_id=self._publish(self.session, work.grant)[1])

    def _publish(self, session: Session, grant: Grant, answer: bytes = b"") -> tuple[ContextRef, int]:
        """Makes the granted context of the session as it is; what it became, and its image's id."""
        model = self.room.model
        geometry = model.geometry(session.kv_type)
        grant = layout.cut_to(grant, session.position, geometry, answer.decode("utf-8", "replace"))
        ref = grant.ref
        if session.position != ref.n_tokens:
            raise Internal(f"context {ref.id} was granted for {ref.n_tokens} tokens and has {session.position}")
        session.set_sampler(UNSET)  # the image is the same, however its tokens came about
        with (
            self._clock("publish"),
            Publication(
                ref, grant.envelope, geometry, pool=self.room.pool, fingerprint=model.fingerprint, numerics=NUMERICS
            ) as publication,
        ):
            if publication.kv is not None:
                session.snapshot_blocks(ref.first_block, ref.n_blocks, publication.kv)
            session.snapshot_thin(publication.image)
            image_id = Image.inspect(publication.image).id
            self.room.faults("seal")
            publication.seal()
        return ref, image_id

    # ---- generate

    def _generate(self, work: GenerateWork) -> Generator[None, None, GenerateDone]:
        if work.grant is not None and work.n != 1:
            raise Internal(f"{work.n} answers cannot be one context")
        for i in range(work.n - 1):
            with self._clock("decode"):
                fork = self.session.fork()
            with fork:
                yield from self._sample(work, fork, i)
            yield
        kept = yield from self._sample(work, self.session, work.n - 1)
        done = self._said(work, "stop")
        return msgspec.structs.replace(done, published=kept.ref, image_id=kept.image_id, publish_error=kept.error)

    def _sample(self, work: GenerateWork, session: Session, i: int) -> Generator[None, None, _Kept]:
        """Sample i, a token a pass; what was kept of it if that was granted."""
        session.set_sampler(msgspec.structs.replace(work.sampling, stream=work.sampling.stream + i))
        answer = self._begin(work)
        said = work.said[i] if work.said and work.said[i].tokens else None
        with closing(Ending(session, answer, watch=work.grant is not None)) as ending:
            known: deque[int] = deque()
            if said is not None:
                n = n_recalled(said, work, self.room.model)
                for _ in self._take_in(session, said.tokens[:n]):
                    yield
                answer.recall(n)
                known.extend(said.tokens[n:])
            while self._draw(work, session, answer, ending, known):
                yield
            return _Kept() if work.grant is None else self._keep(ending, answer.finish("stop").data, work.grant)

    def _begin(self, work: GenerateWork) -> Answer:
        """The next sample's answer."""
        answer = Answer(work, self.room.model, self.id, self.assign.attempt, len(self._answers), self.room.send)
        self._answers.append(answer)
        return answer

    def _draw(self, work: GenerateWork, session: Session, answer: Answer, ending: Ending, known: deque[int]) -> bool:
        """The next token, from `known` while it lasts; False if the answer is finished."""
        self.room.faults("decode")
        with self._clock("decode"):
            token = known.popleft() if known else session.sample()
            if token in work.eog:
                answer.finish("stop")
                return False
            answer.add(token, session)
            ending.added()
            self.room.gauges.tokens_generated += 1
            if answer.stopped:
                answer.finish("stop")
                return False
            if len(answer.tokens) == work.max_tokens or session.position == session.n_ctx:
                answer.finish("length")
                return False
            session.decode(token)
            self.room.gauges.passes += 1
        return True

    def _keep(self, ending: Ending, data: bytes, grant: Grant) -> _Kept:
        """Publishes what the answer left. That it cannot be kept is no reason to lose the answer."""
        try:
            self.room.faults("publish")
            with self._clock("decode"):
                session = ending.state()
            if session is None:
                return _Kept()
            return _Kept(*self._publish(session, grant, data))
        except GeistPoolError as error:
            _log.warning("job %s: its answer is not kept: %s", self.id, error.code)
            return _Kept(error=error_body(error))

    def _said(self, work: GenerateWork, reason: FinishReason) -> GenerateDone:
        """All answers; those that are not finished end here, with this reason."""
        while len(self._answers) < work.n:
            self._begin(work)
        first, *more = [answer.finish(reason) for answer in self._answers]
        self._generated = len(first.tokens) + sum(len(answer.tokens) for answer in more)
        fields = {name: getattr(first, name) for name in SampleDone.__struct_fields__}
        return GenerateDone(**fields, more=tuple(more))

    # ---- files

    def _save(self, work: SaveWork) -> Generator[None, None, SaveDone]:
        session, model = self.session, self.room.model
        if session.position != work.envelope.n_tokens:
            raise Internal(f"context {work.envelope.id} has {session.position} tokens, not {work.envelope.n_tokens}")
        with self._clock("publish"):
            image = session.snapshot()
        yield
        with files.Writer(
            work.path, work.envelope, pool=self.room.pool, fingerprint=model.fingerprint, numerics=NUMERICS
        ) as writer:
            yield from self._pieces("publish", writer.write(image))
            self.room.faults("save")
            with self._clock("publish"):
                return SaveDone(bytes=writer.publish())

    def _load(self, work: LoadWork) -> Generator[None, None, LoadDone]:
        session, model = self.session, self.room.model
        self.room.faults("load")
        with files.Reader(work.path) as reader:
            stored = reader.stored
            if stored.fingerprint != model.fingerprint:
                raise ImageMismatch("the file was made from another model", fingerprint=stored.fingerprint)
            if stored.numerics != NUMERICS:
                raise ImageMismatch(f"the file has numerics version {stored.numerics}; this is version {NUMERICS}")
            yield from self._pieces("attach", reader)
            with self._clock("attach"):
                if not Image.inspect(reader.image).flat:
                    raise ImageDamaged("the file holds a thin image, whose blocks are elsewhere")
                session.restore(reader.image)
            if session.position != stored.envelope.n_tokens or session.snapshot_size != len(reader.image):
                raise ImageDamaged(f"the file's envelope says {stored.envelope.n_tokens} tokens, its image {session.position}")
        self._loaded = session.position
        yield
        self.room.faults("publish")
        _, image_id = self._publish(session, work.grant)
        return LoadDone(image_id=image_id, tokens=tuple(session.tokens.tolist()))

    def _pieces(self, phase: str, steps: Iterable[int]) -> Generator[None, None, None]:
        """A step a pass."""
        rest = iter(steps)
        while True:
            with self._clock(phase):
                if next(rest, None) is None:
                    return
            yield

    # ---- score

    def _score(self, work: ScoreWork) -> Generator[None, None, ScoreDone]:
        scores: list[tuple[float, ...]] = []
        for i, label in enumerate(work.labels):
            if i:
                yield
            self.room.faults("score")
            with self._clock("score"):
                scores.append(tuple(self.session.score(label).tolist()))
            self._generated += len(label)
            self.room.gauges.passes += 1
            self.room.gauges.tokens_generated += len(label)
        return ScoreDone(logprobs=tuple(scores))

    # ---- last words

    def _done(self, result: Result) -> Done:
        usage = Usage(reused=self._reused(), prefilled=self._prefilled, generated=self._generated)
        timings = Timings(**{name: ns // 1000 for name, ns in self._nanoseconds.items()})
        return Done(job=self.id, attempt=self.assign.attempt, result=result, usage=usage, timings=timings)

    def _failed(self, error: GeistPoolError) -> Failed:
        return Failed(job=self.id, attempt=self.assign.attempt, error=error_body(error))

    def _reused(self) -> int:
        return self.assign.chain[-1].n_tokens if self._attached else self._loaded

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._nanoseconds[phase] = self._nanoseconds.get(phase, 0) + time.perf_counter_ns() - start

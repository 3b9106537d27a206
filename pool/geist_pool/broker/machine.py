"""The broker decides here: an event in, actions out. Pure: no I/O and no clock; time is an argument, in Unix seconds.

    actions = machine.handle(Received(...), now)

`books.py` holds the state and its elementary steps, `reports.py` what workers say, `schedule.py` how jobs move on; here are the
clients' side, time and the end.
"""

from __future__ import annotations

from geist_pool.broker import intake, reports
from geist_pool.broker.books import Books, Chapter, MachineConfig, Random
from geist_pool.broker.content import unpack_ids
from geist_pool.broker.events import (
    Action,
    Adopted,
    ClientGone,
    Event,
    Received,
    SendWorker,
    StartText,
    TextReady,
    Tick,
    WorkerLost,
    WorkerSaid,
)
from geist_pool.broker.jobs import HELD_BY_WORKER, Job, JobRequest, Stream, Ticket, Why
from geist_pool.broker.replies import failed, ok
from geist_pool.broker.schedule import advance
from geist_pool.errors import BadRequest, Busy, Cancelled, DeadlineExceeded, GeistPoolError, Stopping, StoreFull, UnknownContext
from geist_pool.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    CancelJob,
    CancelResult,
    ContextCreate,
    ContextDrop,
    ContextDropResult,
    ContextGet,
    ContextList,
    ContextListResult,
    ContextResult,
    Generate,
    Info,
    InfoResult,
    Result,
    Score,
    Shutdown,
    Stats,
    StatsResult,
    Tokenize,
    TokenizeResult,
)

SEED_BITS = 53
"""Of a seed drawn here: a number that every JSON reader keeps exactly."""

__all__ = ["Machine", "MachineConfig"]


class Machine:
    def __init__(self, config: MachineConfig, random: Random) -> None:
        """random: source of seeds and context ids."""
        self._books = Books(config, random)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Everything that follows from the event, to be done in this order."""
        books = self._books
        books.now = max(books.now, now)
        if books.counters.started is None:
            books.counters.started = now
        books.out = []
        if isinstance(event, Received):
            self._received(event)
        elif isinstance(event, WorkerSaid):
            reports.heard(books, event.worker, event.message)
        elif isinstance(event, TextReady):
            self._text_ready(event)
        elif isinstance(event, Tick):
            self._tick()
        elif isinstance(event, ClientGone):
            self._client_gone(event)
        elif isinstance(event, WorkerLost):
            reports.lost(books, event.worker, event.why)
        elif isinstance(event, Adopted):
            reports.adopted(books, event)
            for job in [j for j in books.jobs.values() if j.state == "early"]:
                self._start(job)
        else:
            self._stop()
        advance(books)
        return books.out

    def wake_at(self) -> float | None:
        """When the next deadline of a request passes, if any has one: a Tick is wanted then."""
        return min((t.deadline for t in self._books.tickets.values() if t.deadline is not None), default=None)

    def validate(self) -> None:
        """AssertionError on any contradiction between the collections."""
        self._books.validate()

    def story(self, key: str) -> list[Chapter]:
        """The remembered transitions of one job, worker or context, oldest first."""
        return self._books.story(key)

    @property
    def books(self) -> Books:
        """The state, to be looked at."""
        return self._books

    # ---- requests

    def _received(self, event: Received) -> None:
        books, request = self._books, event.request
        if isinstance(request, GeistPoolError):
            books.counters.requests["malformed"] += 1
            books.reply(event.route, event.request_id, failed(request), json=event.json)
            return
        books.counters.requests[request.__struct_config__.tag or "?"] += 1  # type: ignore[index]
        try:
            if (event.peer, event.request_id) in books.tickets:
                raise BadRequest("a request of this id is in flight already", path="id")
            intake.check_request(request, can_stream=event.can_stream)
            if isinstance(request, Info):
                result: Result = self._info()
            elif isinstance(request, Stats):
                result = self._stats()
            elif isinstance(request, Cancel):
                result = CancelResult(found=self._cancel(event.peer, request.id))
            elif isinstance(request, ContextList | ContextGet | ContextDrop) and books.adopted:
                result = self._look_up(request)
            else:
                self._take_in(event, request)
                return
        except GeistPoolError as error:
            books.reply(event.route, event.request_id, failed(error), json=event.json)
            return
        books.reply(event.route, event.request_id, ok(result), json=event.json)

    def _look_up(self, request: ContextList | ContextGet | ContextDrop) -> Result:
        books = self._books
        if isinstance(request, ContextList):
            return ContextListResult(contexts=tuple(e.info() for e in books.directory.sealed(request.space)))
        entry = books.directory.find(request.space, request.context)
        if entry is None:
            raise _unknown(request.context, request.space, "context")
        if isinstance(request, ContextGet):
            return ContextResult(context=entry.info(), created=False, base=entry.envelope.parent)
        books.tell(entry.id, "sealed", "gone", "dropped")
        books.directory.drop(entry)
        return ContextDropResult(id=entry.id)

    def _take_in(self, event: Received, request: JobRequest) -> None:
        """A request that cannot be answered at once gets a ticket and a job."""
        books = self._books
        if books.stopping:
            raise Stopping("the pool is stopping")
        if books.n_queued >= books.config.queue:
            raise Busy(
                f"{books.n_queued} requests are waiting; no more are taken",
                retry_after=books.counters.retry_after(books.n_queued, books.fleet.n_slots),
            )
        job = Job(key=books.new_job_key(), request=request, peer=event.peer, created=books.now)
        books.jobs[job.key] = job
        deadline = None if request.deadline_ms is None else books.now + request.deadline_ms / 1000
        ticket = Ticket(event.route, event.request_id, event.json, books.now, deadline, request, job.key)
        job.tickets.append(ticket)
        books.open_ticket(ticket)
        if books.adopted or isinstance(request, Tokenize):
            self._start(job)
        else:
            books.move(job, "early")

    def _start(self, job: Job) -> None:
        books = self._books
        try:
            if isinstance(job.request, ContextList | ContextGet | ContextDrop):
                books.end_job(job, ok(self._look_up(job.request)), "looked up")
            else:
                self._start_text(job, job.request)
        except GeistPoolError as error:
            books.fail_job(job, error)

    def _start_text(self, job: Job, request: Tokenize | ContextCreate | Generate | Score) -> None:
        """Leases the context that the request names, and has its text tokenised. Raises UnknownContext."""
        books = self._books
        if not isinstance(request, Tokenize):
            reference, path = intake.base_reference(request)
            if reference is not None:
                base = books.directory.find(request.space, reference)
                if base is None:
                    raise _unknown(reference, request.space, path)
                books.lease(job, base)
            job.in_line = True
            books.lines.join(job.peer, job.key)
        if isinstance(request, Generate):
            given = request.sampling.seed
            job.seed = books.random.getrandbits(SEED_BITS) if given is None else given
            job.stream = Stream() if request.stream else None
        text = intake.text_job(job.key, request, job.base, () if job.base is None else unpack_ids(job.base.tokens))
        if text is not None:
            books.move(job, "text")
            books.out.append(StartText(text))
        else:
            assert job.base is not None
            job.text = intake.no_text(job.key, job.base)
            books.move(job, "held")
            books.lines.touch(job.peer)

    def _text_ready(self, event: TextReady) -> None:
        books, done = self._books, event.done
        job = books.jobs.get(done.key)
        if job is None:  # cancelled meanwhile
            return
        if done.error is not None:
            books.fail_job(job, done.error)
        elif isinstance(job.request, Tokenize):
            books.end_job(job, ok(TokenizeResult(tokens=done.tokens)), "tokenised")
        else:
            job.text = done
            books.move(job, "held")
            books.lines.touch(job.peer)

    # ---- ending early

    def _cancel(self, peer: bytes, text: str) -> bool:
        of_peer = self._books.by_peer.get(peer, {})
        ticket = of_peer.get(text.encode())
        if ticket is None and text.startswith("hex:"):
            try:
                ticket = of_peer.get(bytes.fromhex(text.removeprefix("hex:")))
            except ValueError:
                raise BadRequest("not hexadecimal behind hex:", path="id") from None
        if ticket is None:
            return False
        self._give_up(ticket, "cancelled")
        return True

    def _give_up(self, ticket: Ticket, why: Why) -> None:
        """Ends one request early. What a worker holds for it alone, the worker ends: a generation with what there is of it."""
        books = self._books
        job = books.jobs[ticket.job]
        if job.state in HELD_BY_WORKER and len(job.tickets) == 1:
            self._call_off(job, why, finish=isinstance(job.request, Generate))
            return
        if why == "deadline":
            books.end_ticket(ticket, failed(DeadlineExceeded("the request's deadline passed")))
        else:
            books.end_ticket(ticket, failed(Cancelled("the request was cancelled")))
        if not job.tickets:
            books.move(job, "ended", why)

    def _call_off(self, job: Job, why: Why, *, finish: bool) -> None:
        books = self._books
        if job.state == "cancelling":
            return
        job.cancel = why
        books.stop_sharing(job)
        books.move(job, "cancelling", why)
        assert job.worker is not None
        books.out.append(SendWorker(job.worker, CancelJob(job=job.key, reason=why, finish=finish)))

    def _client_gone(self, event: ClientGone) -> None:
        books = self._books
        books.counters.chunks_dropped += event.dropped
        tickets = tuple(books.by_peer.get(event.peer, {}).values())
        if tickets or event.why == "slow":
            books.log("client_gone", why=event.why, requests=len(tickets), dropped=event.dropped)
        for ticket in tickets:
            job = books.jobs[ticket.job]
            books.end_ticket(ticket, None)
            if job.tickets:
                continue
            if job.state in HELD_BY_WORKER:
                self._call_off(job, "cancelled", finish=False)
            else:
                books.move(job, "ended", event.why)

    # ---- time

    def _tick(self) -> None:
        books, config = self._books, self._books.config
        for ticket in tuple(books.tickets.values()):
            if ticket.deadline is not None and ticket.deadline <= books.now:
                if books.jobs[ticket.job].state == "cancelling":
                    ticket.deadline = None  # its worker has been told
                else:
                    self._give_up(ticket, "deadline")
        for worker, ping in books.fleet.heartbeat(books.now, every_s=config.heartbeat_s, timeout_s=config.worker_timeout_s):
            if ping == "silent":
                reports.condemn(books, worker, f"silent for {config.worker_timeout_s} s")
            else:
                books.out.append(SendWorker(worker.name, ping))
        for context in books.directory.expire(books.now):
            books.tell(context, "sealed", "gone", "expired")
        while books.reserving:
            job = books.jobs[books.reserving[0]]
            if books.now - job.reserving_since < config.reserve_timeout_s or job.grant is None:
                break
            needed = job.grant.ref.image_bytes + job.grant.ref.kv_bytes
            books.fail_job(
                job,
                StoreFull(
                    f"workers have not unmapped evicted contexts within {config.reserve_timeout_s} s",
                    needed=needed,
                    limit=books.directory.limit,
                    used=books.directory.used,
                    held=books.directory.held_bytes(),
                ),
            )

    def _stop(self) -> None:
        """Everyone gets an answer, workers are told to end, shared memory is emptied (or keeps what is sealed)."""
        books = self._books
        if books.stopping:
            return
        books.stopping = True
        n = len(books.tickets)
        for job in tuple(books.jobs.values()):
            books.fail_job(job, Stopping("the pool is stopping"))
        for worker in books.fleet:
            books.out.append(SendWorker(worker.name, Shutdown()))
        books.directory.clear(keep_sealed=books.config.keep_contexts)
        books.log("stopping", requests=n)

    # ---- what there is

    def _info(self) -> InfoResult:
        books, first = self._books, self._books.first
        return InfoResult(
            protocol=PROTOCOL_VERSION,
            version=books.config.version,
            pool=books.config.pool,
            model=books.config.model,
            architecture="" if first is None else first.architecture,
            fingerprint="" if first is None else first.fingerprint,
            n_vocab=books.config.n_vocab if first is None else first.n_vocab,
            n_ctx=0 if first is None else first.n_ctx,
            kv_type=books.config.kv_type if first is None else first.kv_type,
            has_template=books.config.has_template,
            workers=books.fleet.n_ready,
            slots=books.config.slots if first is None else first.slots,
        )

    def _stats(self) -> StatsResult:
        books, counters, directory = self._books, self._books.counters, self._books.directory
        return StatsResult(
            uptime_s=books.now - (books.now if counters.started is None else counters.started),
            workers=books.fleet.n_ready,
            workers_busy=books.fleet.n_busy,
            queue=books.n_queued,
            requests=dict(counters.requests),
            errors=dict(counters.errors),
            tokens_reused=counters.reused,
            tokens_prefilled=counters.prefilled,
            tokens_generated=counters.generated,
            contexts=len(directory.sealed()),
            store_bytes=directory.used,
            store_limit=directory.limit,
            store_orphaned_bytes=directory.orphaned_bytes(),
            store_unmapping_bytes=directory.unmapping_bytes(),
            evictions=directory.evictions,
            jobs_retried=counters.retried,
            workers_lost=counters.workers_lost,
            chunks_dropped=counters.chunks_dropped,
        )


def _unknown(reference: str, space: str, path: str) -> UnknownContext:
    return UnknownContext(f"no context {reference!r} in space {space!r}", path=path)

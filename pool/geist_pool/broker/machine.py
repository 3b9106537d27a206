"""The broker decides here: an event in, actions out. Pure: no I/O and no clock; time is an argument, in Unix seconds.

    actions = machine.handle(Received(...), now)

`books.py` holds the state and its elementary steps, `reports.py` what workers say, `schedule.py` how jobs move on; here are the
clients' side, time and the end.
"""

from __future__ import annotations

from typing import get_args

from geist_pool.broker import bindings, intake, keeping, overview, repeats, reports, saved
from geist_pool.broker.books import Books, MachineConfig, Random
from geist_pool.broker.entries import Entry
from geist_pool.broker.events import (
    Action,
    Adopted,
    ClientGone,
    Dropped,
    Event,
    ListSaved,
    Peeked,
    PeekSaved,
    Received,
    SavedListed,
    SendWorker,
    StartText,
    TextReady,
    Tick,
    WorkerLost,
    WorkerSaid,
)
from geist_pool.broker.jobs import HELD_BY_WORKER, Job, JobRequest, Stream, Ticket, Why
from geist_pool.broker.replies import failed, ok
from geist_pool.broker.schedule import advance, cannot_keep
from geist_pool.broker.story import Chapter
from geist_pool.errors import BadRequest, Busy, Cancelled, GeistPoolError, Stopping, StoreFull, UnknownContext, Unsupported
from geist_pool.protocol import (
    Cancel,
    CancelJob,
    CancelResult,
    ContextCreate,
    ContextDrop,
    ContextDropResult,
    ContextGet,
    ContextList,
    ContextListResult,
    ContextLoad,
    ContextResult,
    ContextSave,
    ContextSaved,
    Generate,
    Info,
    Reply,
    Request,
    Result,
    SavedListResult,
    Score,
    Shutdown,
    Stats,
    Story,
    Tokenize,
    TokenizeResult,
)

OPS = {kind: str(kind.__struct_config__.tag) for kind in get_args(Request)}
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
        elif isinstance(event, Peeked):
            self._peeked(event)
        elif isinstance(event, SavedListed):
            self._saved_listed(event)
        elif isinstance(event, Dropped):
            books.counters.unreadable += event.count
        else:
            self._stop()
        advance(books)
        return books.out

    def wake_at(self) -> float | None:
        """When the next deadline of a request passes, if any has one: a Tick is wanted then."""
        return self._books.next_deadline()

    def validate(self) -> None:
        """AssertionError on any contradiction between the collections."""
        self._books.validate()

    def story(self, key: str) -> list[Chapter]:
        """The remembered transitions of one request, job, worker or context, oldest first."""
        return self._books.story.of(key)

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
        books.counters.asked(request.space, OPS[type(request)])
        try:
            intake.check_request(request, can_stream=event.can_stream)
            self._free_id(event)
            if repeats.taken_care_of(books, event, request):
                return
            if isinstance(request, Info):
                result: Result = overview.info(books)
            elif isinstance(request, Stats):
                result = overview.stats(books)
            elif isinstance(request, Story):
                result = overview.story(books, request.id, request.space)
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
        repeats.remember(books, event, request, ok(result))
        books.reply(event.route, event.request_id, ok(result), json=event.json)

    def _free_id(self, event: Received) -> None:
        """A client that is back under its old name asks something else by this id: nobody comes for what it asked before."""
        before = self._books.tickets.get((event.peer, event.request_id))
        if before is not None and before.left is not None and before.digest != event.digest:
            self._abandon(before, None)

    def _look_up(self, request: ContextList | ContextGet | ContextDrop) -> Result:
        books = self._books
        if isinstance(request, ContextList):
            return ContextListResult(contexts=tuple(e.info() for e in books.directory.sealed(request.space)))
        entry = self._find(request.context, request.space, "context")
        if isinstance(request, ContextGet):
            return ContextResult(context=entry.info(), created=False, base=entry.envelope.parent)
        books.tell("context", entry.id, "sealed", "gone", "dropped", space=entry.space)
        books.directory.drop(entry, "dropped")
        return ContextDropResult(id=entry.id)

    def _find(self, reference: str, space: str, path: str) -> Entry:
        """Raises UnknownContext."""
        entry = self._books.directory.find(space, reference)
        if entry is None:
            raise UnknownContext(f"no context {reference!r} in space {space!r}", path=path)
        return entry

    def _take_in(self, event: Received, request: JobRequest) -> None:
        """A request that cannot be answered at once gets a ticket and a job."""
        books = self._books
        self._check_room(request)
        job = Job(key=books.new_job_key(), request=request, peer=event.peer, created=books.now)
        books.jobs[job.key] = job
        deadline = None if request.deadline_ms is None else books.now + request.deadline_ms / 1000
        ticket = Ticket(event.route, event.request_id, event.json, books.now, deadline, request, job.key, digest=event.digest)
        job.tickets.append(ticket)
        books.open_ticket(ticket)
        if books.adopted or isinstance(request, Tokenize):
            self._start(job)
        else:
            books.move(job, "early")

    def _check_room(self, request: JobRequest) -> None:
        """Raises Stopping, Busy where too many wait, Unsupported where files are not to be had."""
        books = self._books
        if books.stopping:
            raise Stopping("the pool is stopping")
        if isinstance(request, ContextSave | ContextLoad | ContextSaved) and not books.config.saved_dir:
            raise Unsupported("this pool has no directory for saved contexts")
        n, limit = books.n_queued, books.config.queue
        if n >= limit:
            retry_after = books.counters.retry_after(n, books.fleet.n_slots)
            raise Busy(f"{n} requests are waiting; no more are taken", retry_after=retry_after, queued=n, limit=limit)
        quota = books.config.spaces.get(request.space)
        n = books.queued[request.space]
        if quota is not None and 0 < quota.queue <= n:
            raise Busy(
                f"{n} requests of space {request.space!r} are waiting; it may have {quota.queue}",
                retry_after=books.counters.retry_after(n, books.fleet.n_slots),
                queued=n,
                limit=quota.queue,
                space=request.space,
            )

    def _start(self, job: Job) -> None:
        books, request = self._books, job.request
        try:
            if isinstance(request, ContextList | ContextGet | ContextDrop):
                books.end_job(job, ok(self._look_up(request)), "looked up")
            elif isinstance(request, ContextSave | ContextLoad | ContextSaved):
                self._start_file(job, request)
            else:
                self._start_text(job, request)
        except GeistPoolError as error:
            books.fail_job(job, error)

    def _start_file(self, job: Job, request: ContextSave | ContextLoad | ContextSaved) -> None:
        books, root = self._books, self._books.config.saved_dir
        if isinstance(request, ContextSaved):
            directory = saved.directory_of(root, request.space)
            books.move(job, "file")
            books.out.append(ListSaved(job.key, directory))
            return
        if isinstance(request, ContextSave):
            entry = self._find(request.context, request.space, "context")
            job.saved = request.saved or (entry.names[-1] if entry.names else entry.id)
            job.path = saved.file_of(root, request.space, job.saved)
            books.lease(job, entry)
            self._stand_in_line(job)
            books.move(job, "held")
            books.lines.touch(job.peer)
            return
        job.saved = request.saved
        job.path = saved.file_of(root, request.space, job.saved)
        self._stand_in_line(job)
        books.move(job, "file")
        books.out.append(PeekSaved(job.key, job.path))

    def _stand_in_line(self, job: Job) -> None:
        job.in_line = True
        self._books.lines.join(job.peer, job.key)

    def _start_text(self, job: Job, request: Tokenize | ContextCreate | Generate | Score) -> None:
        """Leases the context that the request names, and has its text tokenised. Raises UnknownContext."""
        books = self._books
        if not isinstance(request, Tokenize):
            reference, path = intake.base_reference(request)
            if reference is not None:
                books.lease(job, self._find(reference, request.space, path))
            self._stand_in_line(job)
        if isinstance(request, Generate):
            given = request.sampling.seed
            job.seed = books.random.getrandbits(SEED_BITS) if given is None else given
            job.streams = [Stream() for _ in range(request.n)] if request.stream else None
        text = intake.text_job(job.key, request, job.base)
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
        elif job.answer is not None:
            keeping.text_is_known(books, job, done.tokens)
        else:
            job.text = done
            books.move(job, "held")
            books.lines.touch(job.peer)

    def _peeked(self, event: Peeked) -> None:
        books = self._books
        job = books.jobs.get(event.job)
        if job is None:  # cancelled meanwhile
            return
        if isinstance(event.head, GeistPoolError):
            if isinstance(event.head, UnknownContext):
                event.head.path = "saved"
            books.fail_job(job, event.head)
            return
        job.head = event.head
        books.move(job, "held")
        books.lines.touch(job.peer)

    def _saved_listed(self, event: SavedListed) -> None:
        books = self._books
        job = books.jobs.get(event.job)
        if job is None:
            return
        if isinstance(event.files, GeistPoolError):
            books.fail_job(job, event.files)
            return
        heads = ((f.stem, f.head) for f in event.files)
        infos = (saved.listed(job.space, stem, h.n_tokens, h.n_bytes, h.written, h.fingerprint) for stem, h in heads)
        found = sorted((i for i in infos if i is not None), key=lambda i: i.saved)
        books.end_job(job, ok(SavedListResult(tuple(found))), "listed")

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
            self._call_off(job, why, finish=isinstance(job.request, Generate) and job.answer is None)
            return
        books.fail_ticket(ticket, reports.called_off(why))
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
        slow = failed(Cancelled("answers and chunks were not read; this request was ended when they became too many"))
        for ticket in tickets:
            if event.why == "slow":
                self._abandon(ticket, slow)
            elif ticket.left is None and not books.leave(ticket):
                self._abandon(ticket, None)

    def _abandon(self, ticket: Ticket, reply: Reply | None) -> None:
        """Nobody reads the answer: the request ends, and with it what is done for it alone."""
        books = self._books
        job = books.jobs[ticket.job]
        books.end_ticket(ticket, reply)
        if job.tickets:
            return
        if job.state in HELD_BY_WORKER:
            self._call_off(job, "cancelled", finish=False)
        else:
            books.move(job, "ended", "disconnected" if reply is None else "slow")

    # ---- time

    def _tick(self) -> None:
        books, config = self._books, self._books.config
        for ticket in books.late_tickets():
            if books.jobs[ticket.job].state != "cancelling":  # else its worker has been told
                self._give_up(ticket, "deadline")
        while (absent := books.next_not_returned()) is not None:
            self._abandon(absent, None)
        books.remembered.expire(books.now)
        for worker, ping in books.fleet.heartbeat(books.now, every_s=config.heartbeat_s, timeout_s=config.worker_timeout_s):
            if ping == "silent":
                reports.condemn(books, worker, f"silent for {config.worker_timeout_s} s")
            else:
                books.out.append(SendWorker(worker.name, ping))
        for entry in books.directory.expire(books.now):
            books.tell("context", entry.id, "sealed", "gone", "ttl", space=entry.space)
        bindings.keep(books)
        while books.reserving:
            job = books.jobs[books.reserving[0]]
            if books.now - job.reserving_since < config.reserve_timeout_s or job.grant is None:
                break
            error = StoreFull(
                f"workers have not unmapped evicted contexts within {config.reserve_timeout_s} s",
                needed=job.grant.ref.image_bytes + job.grant.ref.kv_bytes,
                limit=books.directory.limit,
                used=books.directory.used,
                held=books.directory.held_bytes(),
            )
            cannot_keep(books, job, error)

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
        if books.config.keep_contexts:
            bindings.keep(books, at_once=True)
        books.log("stopping", requests=n)

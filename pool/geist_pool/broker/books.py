"""All state of the broker's machine, the elementary steps on it, and what must always hold. Pure: no I/O, no clock.

`move` is the only place where a job changes its state; leaving a state takes the job out of that state's collection, so that no
path can forget to.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping
from typing import Final, Protocol

from msgspec import Struct

from geist_pool.broker import replies
from geist_pool.broker.directory import Directory
from geist_pool.broker.entries import Entry
from geist_pool.broker.events import Action, Log, Route, SendReply, SendWorker, Unlink
from geist_pool.broker.fleet import Fleet
from geist_pool.broker.jobs import HELD_BY_WORKER, NOT_QUEUED, TRANSITIONS, Job, JobState, Lines, Ticket
from geist_pool.broker.placement import Queue
from geist_pool.broker.remembered import Remembered, RepeatKey
from geist_pool.broker.room import Quota
from geist_pool.broker.stats import Counters
from geist_pool.broker.story import Chapter, Kind, Story, request_name
from geist_pool.errors import GeistPoolError
from geist_pool.protocol import (
    ContextCreate,
    ContextDrop,
    ContextLoad,
    ContextSave,
    ErrorBody,
    Generate,
    Hello,
    Reply,
    Score,
)

STORY_LENGTH: Final = 4_000
REMEMBERED: Final = (ContextCreate, ContextDrop, ContextSave, ContextLoad, Generate, Score)
"""Requests whose answer is given again when they are repeated; the others are answered anew, as things are now."""


class MachineConfig(Struct, frozen=True, kw_only=True):
    """What the machine knows from the start. Bytes and seconds."""

    pool: str  # its name
    store: str  # under which its objects are kept, `config.store_key`
    version: str
    model: str  # as clients see it
    n_vocab: int
    eog: tuple[int, ...]  # ids that end a generation
    has_template: bool
    memory: int  # limit of the store
    queue: int = 1024  # requests that may wait
    slots: int = 1  # of a worker
    kv_type: str = "f16"
    heartbeat_s: float = 1.0
    worker_timeout_s: float = 60.0
    max_attempts: int = 2  # workers that may die under one job
    reserve_timeout_s: float = 30.0  # how long a create waits for memory that workers are asked to unmap
    keep_contexts: bool = False
    saved_dir: str = ""  # of saved contexts; "": nothing can be saved
    spaces: Mapping[str, Quota] = {}  # limits of single spaces
    token_bytes: int = 64  # of the vocabulary's longest token
    remember_s: float = 60.0  # how long answers are remembered, and how many, and how many bytes of them
    remember_replies: int = 512
    remember_bytes: int = 32 << 20
    linger_s: float = 1.0  # how long the work for a client whose connection has ended goes on, in case it asks again on another


class Random(Protocol):
    def getrandbits(self, k: int, /) -> int: ...


class Books:
    def __init__(self, config: MachineConfig, random: Random) -> None:
        self.config = config
        self.random = random
        self.now = 0.0
        self.out: list[Action] = []
        self.directory = Directory(config.store, config.memory, self._emit, config.spaces)
        self.fleet = Fleet()
        self.queue = Queue()
        self.lines = Lines()
        self.counters = Counters()
        self.jobs: dict[str, Job] = {}  # live ones
        self.tickets: dict[tuple[bytes, bytes], Ticket] = {}  # live ones by peer and request id
        self.by_peer: dict[bytes, dict[bytes, Ticket]] = {}
        self.reserving: deque[str] = deque()  # creates in the order in which they get memory
        self.making: dict[tuple[str, bytes], str] = {}  # space and tokens -> the create that others may join
        self.first: Hello | None = None  # of the first worker: what model this is
        self.adopted = False  # shared memory has been looked through
        self.stopping = False
        self.bindings_kept = 0.0  # when they were last written down
        self.queued: Counter[str] = Counter()  # jobs that no worker holds yet, by space
        self.remembered = Remembered(seconds=config.remember_s, replies=config.remember_replies, n_bytes=config.remember_bytes)
        self.repeats: dict[RepeatKey, Ticket] = {}  # live ones that may be asked for again, by what is asked
        self.leaving: deque[tuple[float, Ticket]] = deque()  # when its client left, oldest first; some have come back
        self.story = Story(STORY_LENGTH)
        self._deadlines: list[tuple[float, int, Ticket]] = []  # a heap
        self._n_deadlines = 0
        self._n_jobs = 0

    @property
    def open(self) -> bool:
        """Whether contexts can be looked for and jobs may go on: those of an earlier life are back."""
        return self.adopted and not self.stopping

    @property
    def n_queued(self) -> int:
        """Jobs that no worker holds yet."""
        return len(self.jobs) - self.fleet.n_running

    def _emit(self, action: Unlink | SendWorker) -> None:
        if not self.stopping or isinstance(action, Unlink):  # workers that have been told to end need not be told to unmap
            self.out.append(action)

    def log(self, event: str, **fields: str | int | float | None) -> None:
        self.out.append(Log(event, fields))

    # ---- tickets

    def reply(self, route: Route, request_id: bytes, reply: Reply, *, json: bool) -> None:
        if reply.error is not None:
            self.counters.errors[reply.error.code] += 1
        self.out.append(SendReply(route, request_id, reply, json))

    def open_ticket(self, ticket: Ticket) -> None:
        self.tickets[ticket.key] = ticket
        self.by_peer.setdefault(ticket.peer, {})[ticket.request_id] = ticket
        if ticket.digest and isinstance(ticket.request, REMEMBERED):
            self.repeats[ticket.repeat_key] = ticket
        if ticket.deadline is not None:
            self._n_deadlines += 1  # keeps tickets out of the comparison
            heapq.heappush(self._deadlines, (ticket.deadline, self._n_deadlines, ticket))
        self.tell("request", request_name(ticket.request_id), "", "received", space=ticket.request.space, job=ticket.job)

    def next_deadline(self) -> float | None:
        """The earliest deadline that has not been seen to, if there is one."""
        while self._deadlines:
            when, _, ticket = self._deadlines[0]
            if ticket.deadline == when and self.tickets.get(ticket.key) is ticket:
                return when
            heapq.heappop(self._deadlines)
        return None

    def late_tickets(self) -> list[Ticket]:
        """Those whose deadline has passed; each is given once."""
        late: list[Ticket] = []
        while (when := self.next_deadline()) is not None and when <= self.now:
            ticket = heapq.heappop(self._deadlines)[2]
            ticket.deadline = None
            late.append(ticket)
        return late

    def leave(self, ticket: Ticket) -> bool:
        """Its client's connection has ended. True if the request may yet be asked for again: then it goes on for a while."""
        may_return = ticket.digest and isinstance(ticket.request, REMEMBERED) and self.config.linger_s > 0 and not self.stopping
        if may_return:
            ticket.left = self.now
            self.leaving.append((self.now, ticket))
        return bool(may_return)

    def next_not_returned(self) -> Ticket | None:
        """One that has not been asked for again in time, if there is one; it is to be ended."""
        while self.leaving:
            left, ticket = self.leaving[0]
            absent = ticket.left == left and self.tickets.get(ticket.key) is ticket  # it may have come back and left again
            if absent and self.now - left < self.config.linger_s:
                return None
            self.leaving.popleft()
            if absent:
                return ticket
        return None

    def end_ticket(self, ticket: Ticket, reply: Reply | None) -> None:
        """The one place where a request ends: with its final reply, or with None because its client is gone."""
        del self.tickets[ticket.key]
        of_peer = self.by_peer[ticket.peer]
        del of_peer[ticket.request_id]
        if not of_peer:
            del self.by_peer[ticket.peer]
        job = self.jobs[ticket.job]
        job.tickets.remove(ticket)
        repeatable = self.repeats.get(ticket.repeat_key) is ticket
        if repeatable:
            del self.repeats[ticket.repeat_key]
            for other in job.tickets:
                if other.repeat_key == ticket.repeat_key:
                    self.repeats[ticket.repeat_key] = other
        why = "gone" if reply is None else "ok" if reply.error is None else reply.error.code
        self.tell("request", request_name(ticket.request_id), "received", "ended", why, space=job.space, job=job.key)
        if reply is not None and repeatable and reply.ok:
            self.remembered.keep(ticket.repeat_key, reply, self.now)
        if reply is None or ticket.left is not None:
            self.counters.gone_silently += 1
            return
        assert reply.final
        self.reply(ticket.route, ticket.request_id, reply, json=ticket.json)

    def fail_ticket(self, ticket: Ticket, error: GeistPoolError | ErrorBody) -> None:
        """Ends the request with the error, or with what there is of its answer."""
        self.end_ticket(ticket, replies.last_word(self.jobs[ticket.job], ticket, error, self.now))

    # ---- jobs

    def new_job_key(self) -> str:
        self._n_jobs += 1
        return f"j{self._n_jobs}"

    def new_context_id(self) -> str:
        while (context := f"{self.random.getrandbits(48):012x}") in self.directory:
            pass
        return context

    def tell(
        self,
        kind: Kind,
        key: str,
        before: str,
        after: str,
        why: str = "",
        *,
        space: str | None = None,
        job: str | None = None,
        context: str | None = None,
        worker: str | None = None,
    ) -> None:
        self.story.tell(Chapter(self.now, kind, key, before, after, why, space, job, context, worker))

    def move(self, job: Job, to: JobState, why: str = "") -> None:
        """Leaves one state and enters another; what the new state is about (`worker`, `base`, ...) is set before."""
        before = job.state
        if to not in TRANSITIONS[before]:
            raise AssertionError(f"job {job.key} cannot go from {before} to {to} ({why}): {self.story.of(job.key)}")
        worker = job.worker if to == "assigned" or before in HELD_BY_WORKER else None
        context = job.entry or job.base
        self.tell(
            "job", job.key, before, to, why, space=job.space, worker=worker, context=None if context is None else context.id
        )
        if job.in_line and to not in ("text", "file", "held"):
            job.in_line = False
            self.lines.leave(job.peer, job.key)
        if before == "reserving":
            self.reserving.remove(job.key)
        elif before == "waiting" and job.key in self.queue:  # placement has taken out the one it assigns
            self.queue.remove(job.key)
        elif before in HELD_BY_WORKER and to not in HELD_BY_WORKER:
            held_by = self.fleet.get(job.worker or "")
            if held_by is not None:
                held_by.running.discard(job.key)
        if (before in NOT_QUEUED) != (to in NOT_QUEUED):
            self._queue_up(job.space, 1 if before in NOT_QUEUED else -1)
        job.state = to
        if to == "reserving":
            job.reserving_since = self.now
            self.reserving.append(job.key)
        elif to == "ended":
            self._let_go(job)

    def _queue_up(self, space: str, n: int) -> None:
        self.queued[space] += n
        if not self.queued[space]:
            del self.queued[space]

    def _let_go(self, job: Job) -> None:
        del self.jobs[job.key]
        self.stop_sharing(job)
        if job.entry is not None and job.entry.state == "granted":
            self.directory.abandon(job.entry)
        if job.base is not None:
            self.directory.release(job.base, job.key)

    def end_job(self, job: Job, reply: Reply | None, why: str) -> None:
        """Ends the job and everyone who still waits for it, all with the same reply."""
        for ticket in tuple(job.tickets):
            self.end_ticket(ticket, reply)
        self.move(job, "ended", why)

    def fail_job(self, job: Job, error: GeistPoolError | ErrorBody) -> None:
        """Ends the job and everyone who still waits for it with the error, or with what there is of the answer."""
        for ticket in tuple(job.tickets):
            self.fail_ticket(ticket, error)
        self.move(job, "ended", error.code)

    def give_up_grant(self, job: Job) -> None:
        """What was to be made is not made, or not like that."""
        if job.entry is not None and job.entry.state == "granted":
            self.directory.abandon(job.entry)
        job.entry = job.grant = job.more = None

    def lease(self, job: Job, base: Entry) -> None:
        """The job continues this context and holds it until it ends."""
        assert job.base is None
        job.base = base
        self.directory.lease(base, job.key, self.now)

    def share(self, job: Job) -> None:
        """Creates of the same tokens may join this one."""
        self.making[job.space, job.tokens] = job.key

    def stop_sharing(self, job: Job) -> None:
        if self.making.get((job.space, job.tokens)) == job.key:
            del self.making[job.space, job.tokens]

    # ---- checking

    def validate(self) -> None:
        """AssertionError on any contradiction between the collections."""
        self.directory.validate(self.jobs)
        self.queue.validate()
        self.remembered.validate()
        waiting = Counter(j.space for j in self.jobs.values() if j.state not in NOT_QUEUED)
        assert waiting == self.queued and waiting.total() == self.n_queued
        for repeat, ticket in self.repeats.items():
            assert self.tickets.get(ticket.key) is ticket and ticket.repeat_key == repeat
        timed = {id(ticket) for when, _, ticket in self._deadlines if ticket.deadline == when}
        assert all(t.deadline is None or id(t) in timed for t in self.tickets.values()), "a deadline is not watched"
        for address, ticket in self.tickets.items():
            assert address == ticket.key and self.by_peer[ticket.peer][ticket.request_id] is ticket
            assert ticket in self.jobs[ticket.job].tickets, f"ticket {address} waits for nothing"
        assert sum(map(len, self.by_peer.values())) == len(self.tickets)
        assert sum(len(j.tickets) for j in self.jobs.values()) == len(self.tickets)
        lines = self.lines.jobs()
        running = {key: w.name for w in self.fleet for key in w.running}
        assert sum(len(w.running) for w in self.fleet) == len(running), "two workers hold one job"
        assert len(self.reserving) == len(set(self.reserving))
        for key, job in self.jobs.items():
            self._validate_job(key, job, lines, running)
        assert all(key in self.jobs for collection in (lines, running, self.reserving) for key in collection)
        assert sum(j.state == "waiting" for j in self.jobs.values()) == len(self.queue)
        for (space, tokens), key in self.making.items():
            job = self.jobs[key]
            assert (job.space, job.tokens) == (space, tokens) and job.state in ("reserving", "waiting", "assigned")
        for worker in self.fleet:
            assert len(worker.running) <= worker.hello.slots
        if self.fleet.has_room and self.open:
            assert not len(self.queue), "a job waits while a worker has room"
        granted = {j.entry.id for j in self.jobs.values() if j.entry is not None and j.entry.state == "granted"}
        assert granted == self.directory.granted(), "a grant without a job"

    def _validate_job(self, key: str, job: Job, lines: dict[str, bytes], running: dict[str, str]) -> None:
        state = job.state
        assert key == job.key and state not in ("new", "ended")
        assert job.tickets or state in HELD_BY_WORKER, f"job {key} is {state} for nobody"
        assert (key in lines) == job.in_line and (not job.in_line or lines[key] == job.peer)
        assert job.in_line or state not in ("held",)
        assert (key in self.queue) == (state == "waiting")
        assert (key in self.reserving) == (state == "reserving")
        assert (key in running) == (state in HELD_BY_WORKER)
        if state in HELD_BY_WORKER:
            assert running[key] == job.worker
        assert (job.cancel is not None) == (state == "cancelling")
        assert job.base is None or key in job.base.leases
        assert job.deaths < self.config.max_attempts
        has_grant = job.makes_context and state in ("waiting", *HELD_BY_WORKER)
        assert (job.entry is not None) == has_grant, f"job {key} is {state} and its grant is {job.entry}"
        assert state != "reserving" or job.makes_context
        assert job.answer is None or (isinstance(job.request, Generate) and job.makes_context)

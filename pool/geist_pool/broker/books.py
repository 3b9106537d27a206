"""All state of the broker's machine, the elementary steps on it, and what must always hold. Pure: no I/O, no clock.

`move` is the only place where a job changes its state; leaving a state takes the job out of that state's collection, so that no
path can forget to.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from msgspec import Struct

from geist_pool.broker.directory import Directory
from geist_pool.broker.entries import Entry
from geist_pool.broker.events import Action, Log, Route, SendReply, SendWorker, Unlink
from geist_pool.broker.fleet import Fleet
from geist_pool.broker.jobs import HELD_BY_WORKER, TRANSITIONS, Job, JobState, Lines, Ticket
from geist_pool.broker.placement import Queue
from geist_pool.broker.replies import failed
from geist_pool.broker.stats import Counters
from geist_pool.errors import GeistPoolError
from geist_pool.protocol import ContextCreate, ErrorBody, Hello, Reply

STORY_LENGTH = 10_000


class MachineConfig(Struct, frozen=True, kw_only=True):
    """What the machine knows from the start. Bytes and seconds."""

    pool: str
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


class Random(Protocol):
    def getrandbits(self, k: int, /) -> int: ...


class Chapter(Struct, frozen=True):
    """One transition, for the story of a key."""

    at: float
    key: str
    before: str
    after: str
    why: str


class Books:
    def __init__(self, config: MachineConfig, random: Random) -> None:
        self.config = config
        self.random = random
        self.now = 0.0
        self.out: list[Action] = []
        self.directory = Directory(config.pool, config.memory, self._emit)
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
        self._story: deque[Chapter] = deque(maxlen=STORY_LENGTH)
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

    def end_ticket(self, ticket: Ticket, reply: Reply | None) -> None:
        """The one place where a request ends: with its final reply, or with None because its client is gone."""
        del self.tickets[ticket.key]
        of_peer = self.by_peer[ticket.peer]
        del of_peer[ticket.request_id]
        if not of_peer:
            del self.by_peer[ticket.peer]
        self.jobs[ticket.job].tickets.remove(ticket)
        if reply is None:
            self.counters.gone_silently += 1
            return
        assert reply.final
        self.reply(ticket.route, ticket.request_id, reply, json=ticket.json)

    # ---- jobs

    def new_job_key(self) -> str:
        self._n_jobs += 1
        return f"j{self._n_jobs}"

    def new_context_id(self) -> str:
        while (context := f"{self.random.getrandbits(48):012x}") in self.directory:
            pass
        return context

    def tell(self, key: str, before: str, after: str, why: str) -> None:
        self._story.append(Chapter(self.now, key, before, after, why))

    def story(self, key: str) -> list[Chapter]:
        """The remembered transitions of one job, worker or context, oldest first."""
        return [c for c in self._story if c.key == key]

    def move(self, job: Job, to: JobState, why: str = "") -> None:
        """Leaves one state and enters another; what the new state is about (`worker`, `base`, ...) is set before."""
        before = job.state
        if to not in TRANSITIONS[before]:
            raise AssertionError(f"job {job.key} cannot go from {before} to {to} ({why}): {self.story(job.key)}")
        self.tell(job.key, before, to, why)
        if job.in_line and to not in ("text", "held"):
            job.in_line = False
            self.lines.leave(job.peer, job.key)
        if before == "reserving":
            self.reserving.remove(job.key)
        elif before == "waiting" and job.key in self.queue:  # placement has taken out the one it assigns
            self.queue.remove(job.key)
        elif before in HELD_BY_WORKER and to not in HELD_BY_WORKER:
            worker = self.fleet.get(job.worker or "")
            if worker is not None:
                worker.running.discard(job.key)
        job.state = to
        if to == "reserving":
            job.reserving_since = self.now
            self.reserving.append(job.key)
        elif to == "ended":
            self._let_go(job)

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
        self.end_job(job, failed(error), error.code)

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
        if isinstance(job.request, ContextCreate):
            assert (job.entry is not None) == (state in ("waiting", *HELD_BY_WORKER))
        else:
            assert len(job.tickets) <= 1

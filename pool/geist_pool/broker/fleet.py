"""The workers as the machine sees them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from geist_pool.broker.entries import Entry
from geist_pool.broker.placement import Candidate
from geist_pool.protocol import PROTOCOL_VERSION, Hello, Ping, Pong, WorkerStats


@dataclass(slots=True)
class Worker:
    hello: Hello
    heard: float  # when it last said anything
    running: set[str] = field(default_factory=set)  # keys of jobs
    assigned: float = 0.0  # when it was last given one
    pinged: float = 0.0
    unanswered: int | None = None  # number of the Ping that it has not answered
    condemned: bool = False  # is being killed: gets no more work
    done: int = 0  # jobs that it has answered
    pong: Pong | None = None  # what it last said of itself

    @property
    def name(self) -> str:
        return self.hello.worker

    def stats(self) -> WorkerStats:
        pong = self.pong or Pong(0)
        return WorkerStats(
            worker=self.name,
            pid=self.hello.pid,
            busy=len(self.running),
            slots=self.hello.slots,
            jobs_done=self.done,
            passes=pong.passes,
            tokens_prefilled=pong.tokens_prefilled,
            tokens_generated=pong.tokens_generated,
            contexts_mapped=pong.contexts_mapped,
            rss_bytes=pong.rss_bytes,
            private_bytes=pong.private_bytes,
        )


class Fleet:
    """Workers that have said hello and are not known to be dead."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self._pings = 0
        self._seats: set[str] = set()  # names without the number of the life: those that were ever taken

    def __contains__(self, name: str) -> bool:
        return name in self._workers

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, name: str) -> Worker | None:
        return self._workers.get(name)

    def add(self, hello: Hello, now: float) -> bool:
        """True if it takes the place of one that was there before: names are SEAT.LIFE."""
        self._workers[hello.worker] = Worker(hello, heard=now, pinged=now)
        seat = hello.worker.rpartition(".")[0] or hello.worker
        before = len(self._seats)
        self._seats.add(seat)
        return len(self._seats) == before

    def remove(self, name: str) -> Worker:
        return self._workers.pop(name)

    @property
    def n_ready(self) -> int:
        return sum(not w.condemned for w in self._workers.values())

    @property
    def n_busy(self) -> int:
        return sum(bool(w.running) for w in self._workers.values())

    @property
    def n_slots(self) -> int:
        return sum(w.hello.slots for w in self._workers.values() if not w.condemned)

    @property
    def n_running(self) -> int:
        return sum(len(w.running) for w in self._workers.values())

    @property
    def has_room(self) -> bool:
        for worker in self._workers.values():  # noqa: SIM110 asked after every event: a generator would cost more than what it gives
            if len(worker.running) < worker.hello.slots and not worker.condemned:
                return True
        return False

    def candidates(self, leaf: Entry | None) -> list[Candidate]:
        """For placement of a job that continues `leaf`."""
        mapped = frozenset() if leaf is None else leaf.mapped
        return [
            Candidate(w.name, len(w.running), w.hello.slots, w.name in mapped, w.assigned)
            for w in self._workers.values()
            if not w.condemned
        ]

    def heartbeat(self, now: float, *, every_s: float, timeout_s: float) -> list[tuple[Worker, Ping | Literal["silent"]]]:
        """Who is to be pinged now, and who has been silent for too long with a Ping unanswered."""
        out: list[tuple[Worker, Ping | Literal["silent"]]] = []
        for worker in self._workers.values():
            if worker.condemned:
                continue
            if worker.unanswered is not None:
                if now - max(worker.heard, worker.pinged) >= timeout_s:
                    out.append((worker, "silent"))
            elif now - worker.pinged >= every_s:
                self._pings += 1
                worker.unanswered, worker.pinged = self._pings, now
                out.append((worker, Ping(self._pings)))
        return out


def misfit(hello: Hello, first: Hello | None) -> str | None:
    """Why this worker cannot serve beside the first one, or None: answers must not depend on who gives them."""
    if hello.protocol != PROTOCOL_VERSION:
        return f"speaks protocol {hello.protocol}, not {PROTOCOL_VERSION}"
    if hello.slots < 1:
        return "has no slots"
    if first is None:
        return None
    for what in ("fingerprint", "numerics", "image_format", "geometry", "kv_type", "n_vocab", "n_ctx"):
        if getattr(hello, what) != getattr(first, what):
            return f"has another {what} than the first worker"
    return None

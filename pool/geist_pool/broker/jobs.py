"""A client's request, the job that answers it, and the ways a job may go. Pure.

    new ──► text ──► held ──► waiting ─────────────► assigned ──► ended
     │        ▲        │        ▲                      │  ▲ │
     └► early ┘        └─► reserving (creates)         │  └─┘ another worker, after a death
                                                       └► cancelling ──► ended

early: contexts of an earlier life may yet turn up, so none can be looked for. text: tokenised and rendered elsewhere. held: its
turn among the same client's requests has not come. reserving: bytes of shared memory for the new context are not free yet.
waiting: for a worker. cancelling: nobody wants the answer, or only what there is of it, and the worker has been told. From every
state a job may end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

from geist_pool.broker.entries import Entry
from geist_pool.broker.events import Route
from geist_pool.broker.text_types import TextDone
from geist_pool.protocol import (
    ContextCreate,
    ContextDrop,
    ContextGet,
    ContextList,
    Generate,
    Grant,
    Mismatch,
    Score,
    Tokenize,
    TokenLogprob,
)
from geist_pool.text.stream import ByteStream

JobState = Literal["new", "early", "text", "held", "reserving", "waiting", "assigned", "cancelling", "ended"]
Why = Literal["cancelled", "deadline"]
JobRequest = Tokenize | ContextList | ContextGet | ContextDrop | ContextCreate | Generate | Score

TRANSITIONS: Final[dict[JobState, frozenset[JobState]]] = {
    "new": frozenset({"early", "text", "held", "ended"}),
    "early": frozenset({"text", "held", "ended"}),
    "text": frozenset({"held", "ended"}),
    "held": frozenset({"reserving", "waiting", "ended"}),
    "reserving": frozenset({"waiting", "ended"}),
    "waiting": frozenset({"assigned", "ended"}),
    "assigned": frozenset({"waiting", "cancelling", "ended"}),
    "cancelling": frozenset({"ended"}),
    "ended": frozenset(),
}
HELD_BY_WORKER: Final[frozenset[JobState]] = frozenset({"assigned", "cancelling"})


@dataclass(slots=True)
class Ticket:
    """One request of one client: where its replies go. It ends with exactly one final reply, or silently with its client."""

    route: Route
    request_id: bytes
    json: bool
    arrived: float
    deadline: float | None
    request: JobRequest
    job: str  # key of the job that answers it
    created: bool = True  # for creates: it was the one that began the job

    @property
    def peer(self) -> bytes:
        return self.route[0]

    @property
    def key(self) -> tuple[bytes, bytes]:
        return self.peer, self.request_id


@dataclass(slots=True)
class Stream:
    """What has been sent of a streamed answer: a second attempt's repeats are told by it, and if that attempt is cut short, the
    answer is what the client has seen already."""

    tokens: list[int] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: ByteStream = field(default_factory=ByteStream)


@dataclass(slots=True)
class Job:
    """Work for a worker (or for the tokenizer alone), and everyone who waits for it."""

    key: str
    request: JobRequest
    peer: bytes  # whose turn it takes
    created: float
    state: JobState = "new"
    in_line: bool = False  # among its client's jobs that have not taken their place in the queue
    tickets: list[Ticket] = field(default_factory=list)
    text: TextDone | None = None
    base: Entry | None = None  # the context that is continued, named or found by content; leased while the job lives
    tokens: bytes = b""  # all ids from position 0, packed; set when it leaves `held`
    mismatch: Mismatch | None = None
    grant: Grant | None = None  # creates: planned when they begin to reserve
    entry: Entry | None = None  # creates: reserved
    reserving_since: float = 0.0
    seed: int = 0
    attempt: int = 0
    deaths: int = 0  # workers that died under it
    worker: str | None = None
    assigned: float = 0.0
    cancel: Why | None = None
    stream: Stream | None = None

    @property
    def space(self) -> str:
        return self.request.space


class Lines:
    """Per client, the jobs that have not yet taken their place in the queue, in order of arrival: text work that is done sooner
    does not overtake."""

    def __init__(self) -> None:
        self._lines: dict[bytes, deque[str]] = {}
        self._changed: set[bytes] = set()

    def join(self, peer: bytes, job: str) -> None:
        self._lines.setdefault(peer, deque()).append(job)

    def leave(self, peer: bytes, job: str) -> None:
        line = self._lines[peer]
        line.remove(job)
        if not line:
            del self._lines[peer]
        self._changed.add(peer)

    def touch(self, peer: bytes) -> None:
        """Something about this line changed: its head may be able to move."""
        self._changed.add(peer)

    def take_heads(self) -> list[str]:
        """Heads of the lines that changed since the last call."""
        heads = [self._lines[p][0] for p in sorted(self._changed) if p in self._lines]
        self._changed.clear()
        return heads

    def jobs(self) -> dict[str, bytes]:
        """Every job in a line, and whose line it is."""
        return {job: peer for peer, line in self._lines.items() for job in line}

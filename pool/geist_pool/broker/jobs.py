"""A client's request, the job that answers it, and the ways a job may go. Pure.

    new ──► text | file ──► held ──► waiting ─────────────► assigned ──► ended
     │        ▲               │        ▲                      │ │ ▲ │
     └► early ┘               └─► reserving (what makes ◄─┐   │ │ └─┘ another worker, after a death
                                   a context)             │   │ └► cancelling ──► ended
                                                          └ text (a published answer that no state is that of)

early: contexts of an earlier life may yet turn up, so none can be looked for. text: tokenised and rendered elsewhere. file: a
saved context's file is looked at. held: its turn among the same client's requests has not come. reserving: bytes of shared memory
for the new context are not free yet. waiting: for a worker. cancelling: nobody wants the answer, or only what there is of it, and
the worker has been told. From every state a job may end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

from geist_pool.broker.entries import Entry, More
from geist_pool.broker.events import Route, SavedHead
from geist_pool.broker.remembered import RepeatKey
from geist_pool.broker.text_types import TextDone
from geist_pool.protocol import (
    ContextCreate,
    ContextDrop,
    ContextGet,
    ContextList,
    ContextLoad,
    ContextSave,
    ContextSaved,
    Done,
    ErrorBody,
    Generate,
    Grant,
    Mismatch,
    Score,
    Tokenize,
    TokenLogprob,
)
from geist_pool.text.stream import ByteStream

JobState = Literal["new", "early", "text", "file", "held", "reserving", "waiting", "assigned", "cancelling", "ended"]
Why = Literal["cancelled", "deadline"]
JobRequest = (
    Tokenize
    | ContextList
    | ContextGet
    | ContextDrop
    | ContextCreate
    | ContextSave
    | ContextLoad
    | ContextSaved
    | Generate
    | Score
)

TRANSITIONS: Final[dict[JobState, frozenset[JobState]]] = {
    "new": frozenset({"early", "text", "file", "held", "ended"}),
    "early": frozenset({"text", "file", "held", "ended"}),
    "text": frozenset({"held", "reserving", "ended"}),
    "file": frozenset({"held", "ended"}),
    "held": frozenset({"reserving", "waiting", "ended"}),
    "reserving": frozenset({"waiting", "ended"}),
    "waiting": frozenset({"assigned", "ended"}),
    "assigned": frozenset({"waiting", "text", "cancelling", "ended"}),
    "cancelling": frozenset({"ended"}),
    "ended": frozenset(),
}
HELD_BY_WORKER: Final[frozenset[JobState]] = frozenset({"assigned", "cancelling"})
NOT_QUEUED: Final[frozenset[JobState]] = HELD_BY_WORKER | {"new", "ended"}


@dataclass(slots=True, eq=False)
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
    digest: bytes = b""  # of the request's body
    text: TextDone | None = None  # for creates that joined another's job: what their own text is
    left: float | None = None  # when its client's connection ended: it may come back for this, and is sent nothing meanwhile

    @property
    def peer(self) -> bytes:
        return self.route[0]

    @property
    def key(self) -> tuple[bytes, bytes]:
        return self.peer, self.request_id

    @property
    def repeat_key(self) -> RepeatKey:
        return self.request.space, self.request_id, self.digest


@dataclass(slots=True)
class Stream:
    """What has been sent of one sample of a streamed answer: a second attempt's repeats are told by it, and if that attempt is
    cut short, the answer is what the client has seen already."""

    tokens: list[int] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: ByteStream = field(default_factory=ByteStream)


@dataclass(slots=True)
class Answer:
    """A generate's whole answer, and whose it was, while the context of it is still being made."""

    message: Done
    worker: str
    attempts: int
    assigned: float
    context: str | None  # that it continued


@dataclass(slots=True, eq=False)
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
    saved: str = ""  # saves and loads: the name, and the file of it
    path: str = ""
    head: SavedHead | None = None  # loads: what the file says of itself
    grant: Grant | None = None  # of what makes a context: planned when it begins to reserve
    more: More | None = None  # to it: how far the length of an answer is open
    entry: Entry | None = None  # reserved
    reserving_since: float = 0.0
    seed: int = 0
    attempt: int = 0
    deaths: int = 0  # workers that died under it
    worker: str | None = None
    assigned: float = 0.0
    cancel: Why | None = None
    streams: list[Stream] | None = None  # by sample
    answer: Answer | None = None  # a generate whose context has to be computed from its text
    publish_error: ErrorBody | None = None  # a generate whose context cannot be kept

    @property
    def space(self) -> str:
        return self.request.space

    @property
    def makes_context(self) -> bool:
        """Whether a worker is to publish something for it, as far as is known."""
        if isinstance(self.request, Generate):
            return self.request.publish is not None and self.publish_error is None
        return isinstance(self.request, ContextCreate | ContextLoad)


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
        if not self._changed:
            return []
        heads = [self._lines[p][0] for p in sorted(self._changed) if p in self._lines]
        self._changed.clear()
        return heads

    def jobs(self) -> dict[str, bytes]:
        """Every job in a line, and whose line it is."""
        return {job: peer for peer, line in self._lines.items() for job in line}

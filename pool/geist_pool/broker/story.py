"""What happened, as far as it is remembered: transitions of requests, jobs, contexts and workers. Counts and ids only. Pure."""

from __future__ import annotations

from collections import deque
from typing import Literal

from msgspec import Struct

from geist_pool.protocol import StoryEvent

Kind = Literal["request", "job", "context", "worker"]


class Chapter(Struct, frozen=True, gc=False):  # strings and a number: nothing that the collector need look at
    """One transition. `space` is whose it is; None for what concerns everybody (workers)."""

    at: float
    kind: Kind
    key: str
    before: str
    after: str
    why: str
    space: str | None = None
    job: str | None = None
    context: str | None = None
    worker: str | None = None

    def event(self) -> StoryEvent:
        fields: dict[str, str | int | float | bool | None] = {self.kind: self.key}
        for name, value in (("from", self.before), ("why", self.why), ("job", self.job), ("context", self.context)):
            if value:
                fields.setdefault(name, value)
        if self.worker:
            fields.setdefault("worker", self.worker)
        return StoryEvent(at=self.at, what=self.after, fields=fields)


class Story:
    """The last `length` transitions."""

    def __init__(self, length: int) -> None:
        self._chapters: deque[Chapter] = deque(maxlen=length)

    def tell(self, chapter: Chapter) -> None:
        self._chapters.append(chapter)

    def of(self, key: str) -> list[Chapter]:
        """The transitions of one key itself, oldest first."""
        return [c for c in self._chapters if c.key == key]

    def about(self, key: str, space: str) -> list[Chapter]:
        """Everything of the space (and of nobody's) that has to do with this id, oldest first; of a request also what became of
        its job."""
        own = [c for c in self._chapters if c.space is None or c.space == space]
        jobs = {c.job for c in own if c.kind == "request" and c.key == key and c.job is not None}
        return [c for c in own if key in (c.key, c.job, c.context, c.worker) or (c.kind == "job" and c.key in jobs)]


def request_name(request_id: bytes) -> str:
    """A request id as text: itself if it is printable UTF-8, else in hexadecimal with "hex:" in front."""
    try:
        text = request_id.decode()
    except UnicodeDecodeError:
        return f"hex:{request_id.hex()}"
    return text if text.isprintable() else f"hex:{request_id.hex()}"

"""Counters since the broker's start. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Final

from geist_pool.protocol import Pong, Timings, Usage

_SMOOTHING: Final = 0.1  # weight of the newest job in the moving average
SPACES_MAX: Final = 1024
"""Spaces with counters of their own: whoever names a new space for every request shall not fill the memory."""


@dataclass(slots=True)
class SpaceCounters:
    requests: int = 0
    reused: int = 0
    prefilled: int = 0
    generated: int = 0


@dataclass(slots=True)
class Counters:
    started: float | None = None
    requests: Counter[str] = field(default_factory=Counter)  # by op; "malformed" for what has none
    errors: Counter[str] = field(default_factory=Counter)  # by code
    spaces: OrderedDict[str, SpaceCounters] = field(default_factory=OrderedDict)  # the longest unused first
    reused: int = 0
    prefilled: int = 0
    generated: int = 0
    retried: int = 0
    workers_lost: int = 0
    worker_restarts: int = 0
    chunks_dropped: int = 0
    replayed: int = 0  # answers given again
    gone_silently: int = 0  # requests that ended with their client
    stale: int = 0  # words of workers about jobs that are no longer theirs
    unreadable: int = 0  # messages that nothing could be done with
    attach_count: int = 0
    attach_us: int = 0
    queue_us: int = 0
    lost_passes: int = 0  # of workers that are no more
    job_s: float = 1.0  # moving average of a job's time on a worker

    def of(self, space: str) -> SpaceCounters:
        """The space's own counters."""
        found = self.spaces.get(space)
        if found is None:
            found = self.spaces[space] = SpaceCounters()
            if len(self.spaces) > SPACES_MAX:
                self.spaces.popitem(last=False)
        else:
            self.spaces.move_to_end(space)
        return found

    def asked(self, space: str, op: str) -> None:
        self.requests[op] += 1
        self.of(space).requests += 1

    def used(self, space: str, usage: Usage, timings: Timings, seconds: float) -> None:
        """A job came back."""
        own = self.of(space)
        for counters in (self, own):
            counters.reused += usage.reused
            counters.prefilled += usage.prefilled
            counters.generated += usage.generated
        if usage.reused:
            self.attach_count += 1
            self.attach_us += timings.attach
        self.job_s += _SMOOTHING * (max(0.0, seconds) - self.job_s)

    def lost(self, last: Pong | None) -> None:
        """A worker is dead; `last` is what it last said of itself."""
        self.workers_lost += 1
        self.lost_passes += 0 if last is None else last.passes

    def retry_after(self, queued: int, slots: int) -> float:
        """Seconds until a place in a full queue may be expected: a job's time for each job ahead, over all slots; capped."""
        return round(min(60.0, max(0.1, self.job_s * queued / max(1, slots))), 2)

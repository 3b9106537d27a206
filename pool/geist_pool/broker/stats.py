"""Counters since the broker's start. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from geist_pool.protocol import Usage

_SMOOTHING = 0.1  # weight of the newest job in the moving average


@dataclass(slots=True)
class Counters:
    started: float | None = None
    requests: Counter[str] = field(default_factory=Counter)  # by op; "malformed" for what has none
    errors: Counter[str] = field(default_factory=Counter)  # by code
    reused: int = 0
    prefilled: int = 0
    generated: int = 0
    retried: int = 0
    workers_lost: int = 0
    chunks_dropped: int = 0
    gone_silently: int = 0  # requests that ended with their client
    stale: int = 0  # words of workers about jobs that are no longer theirs
    job_s: float = 1.0  # moving average of a job's time on a worker

    def used(self, usage: Usage, seconds: float) -> None:
        """A job came back."""
        self.reused += usage.reused
        self.prefilled += usage.prefilled
        self.generated += usage.generated
        self.job_s += _SMOOTHING * (max(0.0, seconds) - self.job_s)

    def retry_after(self, queued: int, slots: int) -> float:
        """Seconds until a place in a full queue may be expected: a job's time for each job ahead, over all slots; capped."""
        return round(min(60.0, max(0.1, self.job_s * queued / max(1, slots))), 2)

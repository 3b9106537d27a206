"""Which job next, and on which worker. Pure.

Jobs wait in one line per space; spaces take turns, so that a space with a thousand requests does not keep one with a single
request waiting for more than one turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from msgspec import Struct


class Candidate(Struct, frozen=True):
    """A worker as placement sees it."""

    worker: str
    running: int  # jobs it holds
    slots: int
    has_leaf: bool  # it has mapped the context that the job continues
    idle_since: float  # when it was last given a job; less is longer ago


class Queue:
    """Waiting jobs by key: first in first out within a space, round robin over spaces."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[str]] = {}
        self._turns: deque[str] = deque()  # spaces that have jobs, next one first
        self._spaces: dict[str, str] = {}  # of each job

    def __len__(self) -> int:
        return len(self._spaces)

    def __contains__(self, job: str) -> bool:
        return job in self._spaces

    def push(self, job: str, space: str) -> None:
        self._line(job, space).append(job)

    def push_front(self, job: str, space: str) -> None:
        """For a job that was taken before: it does not go to the end again."""
        self._line(job, space).appendleft(job)

    def pop(self) -> str | None:
        """The next job, or None."""
        if not self._turns:
            return None
        space = self._turns.popleft()
        line = self._lines[space]
        job = line.popleft()
        del self._spaces[job]
        if line:
            self._turns.append(space)
        else:
            del self._lines[space]
        return job

    def remove(self, job: str) -> None:
        """Takes a job out, wherever it stands. KeyError if it is not here."""
        space = self._spaces.pop(job)
        line = self._lines[space]
        line.remove(job)
        if not line:
            del self._lines[space]
            self._turns.remove(space)

    def validate(self) -> None:
        """AssertionError on any contradiction."""
        assert sorted(self._turns) == sorted(self._lines), "a space has jobs but no turn, or a turn but no jobs"
        jobs = [(job, space) for space, line in self._lines.items() for job in line]
        assert len(jobs) == len(self._spaces) and dict(jobs) == self._spaces, "lines and jobs disagree"
        assert all(self._lines.values()), "an empty line is kept"

    def _line(self, job: str, space: str) -> deque[str]:
        if job in self._spaces:
            raise ValueError(f"job {job} waits already")
        self._spaces[job] = space
        if space not in self._lines:
            self._lines[space] = deque()
            self._turns.append(space)
        return self._lines[space]


def choose_worker(candidates: Iterable[Candidate]) -> str | None:
    """The worker for a job, None if none has a free slot.

    The least busy first: two jobs on one worker while another idles cost real time, mapping a context costs microseconds. Among
    equals one that has the context mapped, then the one that has been idle longest.
    """
    free = [c for c in candidates if c.running < c.slots]
    if not free:
        return None
    return min(free, key=lambda c: (c.running, not c.has_leaf, c.idle_since, c.worker)).worker

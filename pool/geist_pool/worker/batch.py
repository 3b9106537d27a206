"""Which job gets the next pass. Pure.

Turn and turn about: every job held gets one pass before any gets a second, so a long prefill, cut into chunks, never keeps a
decoding job waiting for more than one chunk.
"""

from __future__ import annotations

from collections import deque


class Turns:
    """Jobs in the order of their next pass."""

    def __init__(self) -> None:
        self._queue: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, job: object) -> bool:
        return job in self._queue

    def add(self, job: str) -> None:
        """A new job: behind all others. ValueError if it is held already."""
        if job in self._queue:
            raise ValueError(f"job {job} is held already")
        self._queue.append(job)

    def remove(self, job: str) -> None:
        """The job is over; the order of the others stays. ValueError if it is not held."""
        self._queue.remove(job)

    def next(self) -> str | None:
        """The job whose pass it is now; its next one comes after everyone else's. None if there are no jobs."""
        if not self._queue:
            return None
        job = self._queue.popleft()
        self._queue.append(job)
        return job

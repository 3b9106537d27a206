"""How long a child that died stays dead, and when starting it again has no point any more. Decides; starts nothing.

A death is *early* if the child lived less than STEADY_S. Early deaths in a row double the pause, up to PAUSE_MOST_S; a child that
lives to be STEADY_S old begins with a clean slate. While the pool starts, a worker may die early START_TRIES times and the broker
once (what ends a broker at its start, such as an address in use, ends the next one as well). Later, one worker alone never ends
the pool; the broker, or all workers, dying early TRIES times in a row does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

BROKER: Final = "broker"
PAUSE_FIRST_S: Final = 0.1
PAUSE_MOST_S: Final = 5.0
STEADY_S: Final = 10.0
START_TRIES: Final = 3
TRIES: Final = 8


class Restarts:
    """The early deaths of one pool's children, by name ("broker", "w0", ...)."""

    def __init__(self, workers: Sequence[str]) -> None:
        self._workers = tuple(workers)
        self._early: dict[str, int] = {}

    def died(self, name: str, age: float) -> float:
        """Notes a death at the age of so many seconds; the pause in seconds before the next life."""
        n = 1 if age >= STEADY_S else self._early.get(name, 0) + 1
        self._early[name] = n
        return min(PAUSE_MOST_S, PAUSE_FIRST_S * 2.0 ** min(n - 1, 32))

    def start_failed(self, name: str) -> bool:
        """Whether the death just noted, before the pool was ready, ends the start."""
        return self._early[name] >= (1 if name == BROKER else START_TRIES)

    def hopeless(self, ages: Mapping[str, float]) -> str | None:
        """In words, why a pool that was ready should give up; None if it should not. ages: of the children that live now."""
        for name in [n for n, age in ages.items() if age >= STEADY_S]:
            self._early.pop(name, None)
        if self._early.get(BROKER, 0) >= TRIES:
            return f"the broker died {self._early[BROKER]} times in a row within {STEADY_S:g} s of its start"
        if all(self._early.get(name, 0) >= TRIES for name in self._workers):
            return f"every worker died {TRIES} times in a row or more within {STEADY_S:g} s of its start"
        return None

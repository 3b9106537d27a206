"""Faults on request, so that tests can show what happens when a worker dies at the worst moment.

A configured fault is ``<what>-<point>=<number>``:

    kill-<point>=n   the process kills itself (SIGKILL) the n-th time it comes to the point; "=1" may be left out
    stop-<point>=n   it stops (SIGSTOP): alive, but it answers no more
    slow-<point>=ms  it sleeps each time

Without configuration a point does nothing. Words of other processes are ignored.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from typing import Final

POINTS: Final = ("attach", "prefill", "publish", "seal", "decode", "score", "reply")

_WORD: Final = re.compile(rf"(kill|stop|slow)-({'|'.join(POINTS)})(?:=([0-9]+))?", re.ASCII)


class Faults:
    """The faults of one process; call it with the name of each point passed."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        found = [m for m in map(_WORD.fullmatch, words) if m is not None]
        self._table = {(m[2], m[1]): int(m[3] or 1) for m in found}

    def __call__(self, point: str) -> None:
        if not self._table:
            return
        for what, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
            left = self._table.get((point, what))
            if left is not None:
                self._table[point, what] = left - 1
                if left == 1:
                    os.kill(os.getpid(), number)
        time.sleep(self._table.get((point, "slow"), 0) / 1000)

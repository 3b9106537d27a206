"""Faults on request, so that tests can show what happens when a worker dies at the worst moment.

A configured fault is ``<what>-<point>=<number>``; "=1" may be left out:

    kill-<point>=n   the process kills itself (SIGKILL) the n-th time it comes to the point
    stop-<point>=n   it stops (SIGSTOP) the n-th time: alive, but it answers no more
    fail-<point>=n   it raises Internal the n-th time
    slow-<point>=ms  it sleeps each time

Without configuration a point does nothing. Words of other processes are ignored.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final

from geist_pool.errors import Internal

POINTS: Final[dict[str, str]] = {
    "attach": "before a context is mapped and attached to",
    "prefill": "before each chunk of a prompt",
    "publish": "before a context's objects are made; of a generate that keeps its answer, after the last token",
    "seal": "when both objects are full, before the state word",
    "decode": "before each token is drawn",
    "score": "before each label",
    "save": "when a file is whole under its temporary name, before it gets its own",
    "load": "before a file is opened",
    "reply": "before a job's last word is sent; its session and contexts are free by then. Here fail ends the process",
}
"""Every point, and where it lies."""

_WORD: Final = re.compile(rf"(kill|stop|fail|slow)-({'|'.join(POINTS)})(?:=([0-9]+))?", re.ASCII)


def _raise(point: str) -> None:
    raise Internal(f"a fault was asked for at {point}", point=point)


_COUNTED: Final[dict[str, Callable[[str], None]]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "fail": _raise,
}


class Faults:
    """The faults of one process; call it with the name of each point passed."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        found = [m for m in map(_WORD.fullmatch, words) if m is not None]
        self._table = {(m[2], m[1]): int(m[3] or 1) for m in found}

    def __call__(self, point: str) -> None:
        assert point in POINTS, point
        if not self._table:
            return
        for what, act in _COUNTED.items():
            left = self._table.get((point, what))
            if left is not None:
                self._table[point, what] = left - 1
                if left == 1:
                    act(point)
        time.sleep(self._table.get((point, "slow"), 0) / 1000)

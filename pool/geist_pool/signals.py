"""Signals that ask a program to end, as exceptions in its main thread, and a stretch of code that they do not reach."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """One of these signals came; `number` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the block by Interrupted. Only in the main thread.

    It is put around the pool, so that a signal during the start, too, stops everything in order. What the caller ignores (SIGHUP
    under nohup, SIGINT of a background job) stays ignored.
    """

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number)

    wanted = [n for n in ENDING if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, interrupt) for n in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds those signals back while the pool stops: a second Ctrl-C must not leave half of it. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

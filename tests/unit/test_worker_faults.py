"""Faults on request.

Property: a fault happens at its point at its count and nowhere else; without configuration a point does nothing. Tolerance: none.
Reason: the tests of dying workers stand on these.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from geist_pool.errors import Internal
from geist_pool.worker import faults
from geist_pool.worker.faults import POINTS, Faults


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sent: list[int] = []

    def kill(pid: int, number: int) -> None:
        assert pid == os.getpid()
        sent.append(number)

    monkeypatch.setattr(faults.os, "kill", kill)
    return sent


def test_nothing_is_asked_for_and_nothing_happens(signals: list[int]) -> None:
    for table in (Faults(), Faults(("broker-slow", "kill-nowhere=1", "kill-decode=x", "kill-"))):
        for point in POINTS:
            table(point)
    assert signals == []


def test_the_count_is_exact(signals: list[int]) -> None:
    table = Faults(("kill-decode=3", "stop-attach"))
    for _ in range(2):
        table("decode")
        table("score")
    assert signals == []
    table("decode")
    assert signals == [signal.SIGKILL]
    table("decode")
    table("attach")
    table("attach")
    assert signals == [signal.SIGKILL, signal.SIGSTOP]


def test_fail_raises_once() -> None:
    table = Faults(("fail-save=2",))
    table("save")
    table("load")
    with pytest.raises(Internal, match="save"):
        table("save")
    table("save")


def test_every_point_is_passed_somewhere() -> None:
    """The table and the code agree: each point is named once in the worker's source, and no other is."""
    sources = [path.read_text() for path in Path(faults.__file__).parent.glob("*.py")]
    passed = [point for text in sources for point in re.findall(r'faults\("([a-z]+)"\)', text)]
    assert set(passed) == set(POINTS)
    with pytest.raises(AssertionError):
        Faults()("nowhere")


def test_slow_is_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    table = Faults(("slow-prefill=250",))
    for point in ("prefill", "decode", "prefill"):
        table(point)
    assert [s for s in slept if s] == [0.25, 0.25]

"""When a child that died is started again, and when the pool gives up.

Property: pauses double from death to death and stay bounded; a child that lived long begins anew; at the start a worker has three
lives and the broker one; later only the broker or all workers dying again and again end the pool. Tolerance: none; time is an
argument. Reason: a loop of deaths must neither eat the machine nor hide behind a service that looks alive.
"""

from __future__ import annotations

import pytest

from geist_pool.restarts import PAUSE_FIRST_S, PAUSE_MOST_S, STEADY_S, TRIES, Restarts


def test_pauses_double_and_are_bounded() -> None:
    restarts = Restarts(["w0"])
    pauses = [restarts.died("w0", 0.5) for _ in range(2000)]
    assert pauses[:4] == [PAUSE_FIRST_S * f for f in (1, 2, 4, 8)]
    assert pauses == sorted(pauses) and pauses[-1] == PAUSE_MOST_S


def test_long_life_resets() -> None:
    restarts = Restarts(["w0"])
    for _ in range(5):
        restarts.died("w0", 0.5)
    assert restarts.died("w0", STEADY_S) == PAUSE_FIRST_S
    assert restarts.died("w0", 0.5) == 2 * PAUSE_FIRST_S


def test_lives_at_the_start() -> None:
    restarts = Restarts(["w0", "w1"])
    restarts.died("broker", 0.1)
    assert restarts.start_failed("broker")
    found = []
    for _ in range(3):
        restarts.died("w1", 0.1)
        found.append(restarts.start_failed("w1"))
    assert found == [False, False, True]


@pytest.mark.parametrize("who", [("broker",), ("w0", "w1")])
def test_gives_up_in_the_end(who: tuple[str, ...]) -> None:
    restarts = Restarts(["w0", "w1"])
    for _ in range(TRIES - 1):
        for name in who:
            restarts.died(name, 0.1)
    assert restarts.hopeless({}) is None
    for name in who:
        restarts.died(name, 0.1)
    assert restarts.hopeless({}) is not None


def test_one_worker_that_lives_is_hope() -> None:
    restarts = Restarts(["w0", "w1"])
    for _ in range(5 * TRIES):
        restarts.died("w0", 0.1)
    assert restarts.hopeless({"w1": 0.0}) is None
    for _ in range(TRIES):
        restarts.died("w1", 0.1)
    assert restarts.hopeless({"w0": STEADY_S}) is None  # it has recovered since: its deaths are forgotten
    assert restarts.hopeless({"w0": 0.0}) is None
    for _ in range(TRIES):
        restarts.died("w0", 0.1)
    assert restarts.hopeless({}) is not None

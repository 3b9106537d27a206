"""Turns of the jobs that a worker holds.

Property: between two passes of one job every other job held the whole time gets exactly one; removing a job changes nobody else's
order. Tolerance: none. Reason: one long prefill must not starve a decoding job (FINDINGS row 19).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geist_pool.worker.batch import Turns


def test_no_job_no_turn() -> None:
    assert Turns().next() is None


def test_turn_and_turn_about() -> None:
    turns = Turns()
    for job in "abc":
        turns.add(job)
    assert [turns.next() for _ in range(7)] == list("abcabca")


def test_a_new_job_waits_for_one_round_at_most() -> None:
    turns = Turns()
    turns.add("a")
    turns.add("b")
    assert turns.next() == "a"
    turns.add("c")
    assert [turns.next() for _ in range(4)] == list("bacb")


def test_removing_leaves_the_others_in_order() -> None:
    turns = Turns()
    for job in "abcd":
        turns.add(job)
    turns.next()
    turns.remove("c")
    assert [turns.next() for _ in range(4)] == list("bdab")
    assert len(turns) == 3
    assert "c" not in turns


def test_misuse_is_an_error() -> None:
    turns = Turns()
    turns.add("a")
    with pytest.raises(ValueError, match="held already"):
        turns.add("a")
    with pytest.raises(ValueError):
        turns.remove("b")


@given(st.lists(st.integers(0, 5)))
def test_fairness_under_any_history(history: list[int]) -> None:
    turns = Turns()
    passes: dict[str, int] = {}
    for step in history:
        job = f"j{step}"
        if step == 0:
            turn = turns.next()
            assert (turn is None) == (not passes)
            if turn is not None:
                passes[turn] += 1
        elif job in turns:
            turns.remove(job)
            del passes[job]
        else:
            turns.add(job)
            passes[job] = 0
    base = dict(passes)
    for _ in range(3 * len(passes)):
        turn = turns.next()
        assert turn is not None
        passes[turn] += 1
        gained = [passes[j] - base[j] for j in passes]
        assert max(gained) - min(gained) <= 1
    assert all(passes[j] - base[j] == 3 for j in passes)

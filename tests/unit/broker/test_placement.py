"""Property: jobs leave the queue first in first out within a space and in turns over spaces; a worker with a free slot that has
the context mapped is preferred, but never waited for. Tolerance: none. Reason: fairness is a promise to every space.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geist_pool.broker.placement import Candidate, Queue, choose_worker


def drain(queue: Queue) -> list[str]:
    out = []
    while (job := queue.pop()) is not None:
        queue.validate()
        out.append(job)
    return out


def test_round_robin_over_spaces():
    queue = Queue()
    for job, space in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c"), ("b2", "b")):
        queue.push(job, space)
    assert drain(queue) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_job_that_comes_back_is_first_of_its_space():
    queue = Queue()
    for job in ("1", "2", "3"):
        queue.push(job, "s")
    assert queue.pop() == "1"
    queue.push_front("1", "s")
    assert drain(queue) == ["1", "2", "3"]


def test_twice_is_a_bug():
    queue = Queue()
    queue.push("1", "s")
    with pytest.raises(ValueError):
        queue.push("1", "t")
    with pytest.raises(KeyError):
        queue.remove("2")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_any_order_of_pushes_and_removals(steps):
    queue, inside = Queue(), []
    for n, (space, remove) in enumerate(steps):
        if remove and inside:
            queue.remove(inside.pop(len(inside) // 2)[1])
        else:
            queue.push(f"j{n}", space)
            inside.append((space, f"j{n}"))
        queue.validate()
        assert len(queue) == len(inside)
    left = drain(queue)
    assert sorted(left) == sorted(job for _, job in inside)
    for space in "abc":
        own = [job for s, job in inside if s == space]
        assert [job for job in left if job in own] == own
    counts = {space: sum(s == space for s, _ in inside) for space in "abc"}
    of = {job: space for space, job in inside}
    busy = [s for s in counts if counts[s]]
    if busy:  # while all spaces have jobs, each gets one per turn
        first = [of[job] for job in left[: len(busy) * min(counts[s] for s in busy)]]
        assert all(first.count(s) == min(counts[t] for t in busy) for s in busy)


def worker(name, running=0, slots=1, has_leaf=False, idle_since=0.0):
    return Candidate(name, running, slots, has_leaf, idle_since)


def test_choice_of_worker():
    assert choose_worker([]) is None
    assert choose_worker([worker("w", running=1)]) is None
    assert choose_worker([worker("a"), worker("b", has_leaf=True)]) == "b"
    # it has the context, but is busy: the idle one is not kept waiting
    assert choose_worker([worker("a"), worker("b", running=1, has_leaf=True)]) == "a"
    assert choose_worker([worker("a"), worker("b", running=1, slots=2, has_leaf=True)]) == "a"
    assert choose_worker([worker("a", idle_since=5.0), worker("b", idle_since=4.0)]) == "b"

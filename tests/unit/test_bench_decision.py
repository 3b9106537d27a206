"""Properties of the decision's sides: a context and questions of exactly the lengths stated, no question beginning as another
does (so that none can be reused), each side put the same questions in the same order, and a side's own clock taken where it has
one. Tolerance: none; nothing is computed.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
try:
    decision: Any = importlib.import_module("bench.decision")
    harness: Any = importlib.import_module("bench.harness")
finally:
    sys.path.remove(str(ROOT))

IDS = [7, 3, 3, 9, 4, 11, 7, 5]


def test_lengths_and_first_tokens() -> None:
    prompts = decision.Prompts(IDS)
    questions = [prompts.question(i) for i in range(5)]
    assert len(prompts.context) == 700 and {len(q) for q in [*questions, prompts.spare]} == {100}
    firsts = [q[0] for q in [*questions, prompts.spare]]
    assert sorted(firsts) == sorted(set(IDS))
    with pytest.raises(ValueError, match="5 different questions"):
        prompts.question(5)


def test_every_side_is_put_the_same_questions() -> None:
    prompts = decision.Prompts(IDS)
    seen: dict[str, list[list[int]]] = {"ours": [], "theirs": []}

    def answer(name: str, seconds: float | None) -> Any:
        def one(question: list[int]) -> Any:
            seen[name].append(question)
            return decision.Given((1,), 700, 100, seconds)

        return one

    sides = [decision.Side("ours", answer("ours", None), prompts), decision.Side("theirs", answer("theirs", 123.0), prompts)]
    samples = harness.interleave([side.turn for side in sides], 3)
    assert seen["ours"] == seen["theirs"] == [prompts.question(i) for i in range(4)]
    assert samples["theirs"] == [123.0] * 3 and max(samples["ours"]) < 60


def test_counts_in_words() -> None:
    assert decision.spoken([516, 516]) == 516
    assert decision.spoken([100, 516, 516]) == "100 to 516, median 516"

# Property: the demo's questions can be joined to its context at the token boundary and told apart by score,
# and both forms of the context hold the same prose. Exact: these are strings.
# The token count (about 700) and the equality of tokens across the join need the model's vocabulary, and are
# held by the tests on SmolLM2.

from itertools import permutations

import pytest

from geist_pool.demo import world


def test_both_forms_hold_the_same_prose() -> None:
    assert "\n\n".join(m.content for m in world.CONTEXT_MESSAGES) == world.CONTEXT_TEXT
    assert [m.role for m in world.CONTEXT_MESSAGES] == ["system", "user"]


def test_prose_is_unwrapped() -> None:
    assert world.CONTEXT_TEXT.strip() == world.CONTEXT_TEXT
    assert all("\n" not in p and "  " not in p for p in world.CONTEXT_TEXT.split("\n\n"))


def test_half_is_said_and_half_is_chosen() -> None:
    said = [q for q in world.QUESTIONS if isinstance(q, world.Say)]
    chosen = [q for q in world.QUESTIONS if isinstance(q, world.Choose)]
    assert len(said) == len(chosen) >= 4
    assert len({q.character for q in world.QUESTIONS}) >= 5


@pytest.mark.parametrize("question", world.QUESTIONS, ids=lambda q: f"{type(q).__name__}-{q.character}")
def test_question_joins_cleanly(question: world.Question) -> None:
    assert question.suffix.startswith("\n")
    assert question.suffix == question.suffix.rstrip(), "a trailing space would merge into the next word"
    if isinstance(question, world.Say):
        assert question.suffix.count('"') % 2 == 1, "the answer ends at the quotation mark that closes it"
        assert '"' in question.stop
        assert 0 < question.max_tokens <= 64
    else:
        assert 3 <= len(question.labels) <= 5
        for label in question.labels:
            assert label.startswith(" ") and label == label.rstrip()
            assert len(label.split()) >= 2
        for a, b in permutations(question.labels, 2):
            assert not b.startswith(a)

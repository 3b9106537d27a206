"""What a rendering of a conversation adds behind the context that holds its beginning."""

from __future__ import annotations

from geist_pool.errors import TemplateMismatch

EXCERPT_CHARS = 200
"""How much of each text an error shows from the first difference on."""


def suffix_of(context_text: str, rendered: str, *, path: str | None = None) -> str:
    """The part of `rendered` behind `context_text`.

    A template may rewrite earlier turns when later ones follow (reasoning models drop their `<think>` blocks
    from all turns but the last): then the state of the context is not that of the conversation, and nothing
    short of a fresh prefill is right.
    Raises TemplateMismatch with the position of the first difference, in characters, and both texts from
    there on.
    """
    if rendered.startswith(context_text):
        return rendered[len(context_text) :]
    position = first_difference(context_text, rendered)
    have = context_text[position : position + EXCERPT_CHARS]
    want = rendered[position : position + EXCERPT_CHARS]
    raise TemplateMismatch(
        f"the conversation does not begin with the context's text; first difference at character {position}: "
        f"the context has {have!r}, the template renders {want!r}",
        path=path,
        position=position,
        context=have,
        rendered=want,
    )


def first_difference(left: str, right: str) -> int:
    """Index of the first character in which the texts differ; the shorter length if one begins the other."""
    n = min(len(left), len(right))
    low, high = 0, n  # left[:low] == right[:low]; the first difference lies in [low, high]
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

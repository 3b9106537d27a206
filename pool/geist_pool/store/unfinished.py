"""What this process has begun to write and not finished, so that it can be undone when the process ends in the middle.

A `with` undoes it on every way out that Python sees. The end of the parent pipe is none of these: a thread notices it and ends
the process while the main thread is still writing. SIGKILL is none either; what it leaves is removed at the next start.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

_undo: dict[object, Callable[[], object]] = {}


def begin(undo: Callable[[], object]) -> object:
    """Something is being written; `undo` removes it. The token is for `end`."""
    token = object()
    _undo[token] = undo
    return token


def end(token: object) -> None:
    """It is finished, or gone. Allowed twice."""
    _undo.pop(token, None)


def undo_all() -> None:
    """Undoes everything begun and not ended; from any thread. An error in one of them does not keep the others."""
    for token in list(_undo):
        undo = _undo.pop(token, None)
        if undo is not None:
            with suppress(Exception):
                undo()

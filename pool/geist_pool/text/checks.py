"""What text from a client may hold."""

from __future__ import annotations

import re

from geist_pool.errors import BadRequest

_SURROGATE = re.compile("[\ud800-\udfff]")


def check_no_nul(value: str, path: str) -> None:
    """Refuse U+0000 in names, ids and stop strings (text may hold it; there it is a character).

    Raises BadRequest with `path` and the position in characters.
    """
    position = value.find("\0")
    if position >= 0:
        raise BadRequest(f"NUL character at position {position}", path=path, position=position)


def check_encodable(text: str, path: str | None = None) -> None:
    """Refuse lone surrogates: they are halves of characters and have no UTF-8 form.

    Raises BadRequest with `path` and the position in characters of the first one.
    """
    match = _SURROGATE.search(text)
    if match is not None:
        position = match.start()
        raise BadRequest(
            f"lone surrogate U+{ord(match.group()):04X} at position {position} is no character",
            path=path,
            position=position,
        )

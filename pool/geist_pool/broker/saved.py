"""Where saved contexts lie: names of files from names of clients. Pure.

    DIRECTORY/SPACE/NAME.geist, space and name percent-encoded

Every byte but letters, digits, `-` and `_` is written as %XX, so that no name leaves its directory, hides, or means another.
"""

from __future__ import annotations

import re
from typing import Final

from geist_pool.errors import BadRequest
from geist_pool.protocol import SavedInfo

SUFFIX: Final = ".geist"
STEM_MAX: Final = 200
"""Bytes of an encoded name: what file systems take (255) less suffixes."""

_PLAIN: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
_STEM: Final = re.compile(r"(?:[A-Za-z0-9_-]|%[0-9A-F]{2})+", re.ASCII)


def encode(name: str, path: str) -> str:
    """The name as part of a path. Raises BadRequest with `path` where that is too long."""
    stem = "".join(chr(b) if b in _PLAIN else f"%{b:02X}" for b in name.encode())
    if len(stem) > STEM_MAX:
        raise BadRequest(f"a file of this name would need {len(stem)} bytes; at most {STEM_MAX} are taken", path=path)
    return stem


def decode(stem: str) -> str | None:
    """The name behind what `encode` gives; None for anything else."""
    if not _STEM.fullmatch(stem):
        return None
    data = re.sub(rb"%(..)", lambda m: bytes([int(m[1], 16)]), stem.encode())
    try:
        name = data.decode()
    except UnicodeDecodeError:
        return None
    return name if encode(name, "saved") == stem else None


def directory_of(root: str, space: str) -> str:
    """Where a space's files lie. Raises BadRequest."""
    return f"{root}/{encode(space, 'space')}"


def file_of(root: str, space: str, name: str) -> str:
    """The file of a saved context. Raises BadRequest."""
    return f"{directory_of(root, space)}/{encode(name, 'saved')}{SUFFIX}"


def listed(space: str, stem: str, n_tokens: int, n_bytes: int, written: float, fingerprint: str) -> SavedInfo | None:
    """A file of the space's directory as clients see it; None for one that was not saved under a name."""
    name = decode(stem)
    if name is None:
        return None
    return SavedInfo(saved=name, space=space, n_tokens=n_tokens, bytes=n_bytes, written=written, fingerprint=fingerprint)

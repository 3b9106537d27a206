"""Names of shared-memory objects: built from a pool's key and a context's id, never from the wire.

    /gp-0a1b2c3d-00112233aabb-i1        the image object of context 00112233aabb, made by the first attempt
        |        |            |
        |        |            kind (i: envelope and thin image, k: whole KV blocks) and attempt
        |        12 hexadecimal digits of the broker's choice
        8 hexadecimal digits of SHA-256 over the pool's key (`store_key`)

At most 30 characters with the leading slash, which every POSIX system takes. Parsing accepts this exact form and nothing else, so
that what the store lists, adopts or unlinks is never someone else's file.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, Literal

from msgspec import Struct

MAX_NAME: Final = 30
MAX_ATTEMPT: Final = 999

Kind = Literal["i", "k"]

_NAME: Final = re.compile(r"/gp-([0-9a-f]{8})-([0-9a-f]{12})-([ik])([1-9][0-9]{0,2})", re.ASCII)
_CONTEXT: Final = re.compile(r"[0-9a-f]{12}", re.ASCII)


class ObjectName(Struct, frozen=True):
    """The parts of a name."""

    tag: str  # of the pool
    context: str
    kind: Kind
    attempt: int


def store_key(uid: int, directory: bytes, name: str) -> str:
    """What tells a pool's objects from all others: user, directory of its sockets and lock (resolved), and name, as 64 digits.

    Pools of one name in two directories run side by side and share nothing; a restarted pool has the key that it had.
    """
    return hashlib.sha256(b"%d\0%b\0%b" % (uid, directory, name.encode())).hexdigest()


def pool_digest(pool: str) -> bytes:
    """32 bytes that stand for the pool's key; the first four are its tag. `pool` is the key, here and everywhere in the store."""
    return hashlib.sha256(pool.encode()).digest()


def pool_tag(pool: str) -> str:
    """8 hexadecimal digits that mark a pool's objects."""
    return pool_digest(pool)[:4].hex()


def is_context_id(text: str) -> bool:
    """Whether this is a context's id: 12 lowercase hexadecimal digits."""
    return _CONTEXT.fullmatch(text) is not None


def object_name(pool: str, context: str, kind: Kind, attempt: int = 1) -> str:
    """The name of a context's object; ValueError for an id or an attempt that no name can hold."""
    if not is_context_id(context):
        raise ValueError(f"a context id is 12 lowercase hexadecimal digits, not {context!r}")
    if kind not in ("i", "k"):
        raise ValueError(f"an object's kind is 'i' or 'k', not {kind!r}")
    if not 1 <= attempt <= MAX_ATTEMPT:
        raise ValueError(f"attempt {attempt} is outside 1 to {MAX_ATTEMPT}")
    return f"/gp-{pool_tag(pool)}-{context}-{kind}{attempt}"


def image_name(pool: str, context: str, attempt: int = 1) -> str:
    """The name of the object that holds envelope and thin image."""
    return object_name(pool, context, "i", attempt)


def kv_name(pool: str, context: str, attempt: int = 1) -> str:
    """The name of the object that holds the context's own whole KV blocks."""
    return object_name(pool, context, "k", attempt)


def parse_name(name: str) -> ObjectName | None:
    """The parts of a name of exactly this form, else None. The slash in front is part of it."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    kind: Kind = "i" if match[3] == "i" else "k"
    return ObjectName(tag=match[1], context=match[2], kind=kind, attempt=int(match[4]))


def check_name(name: str) -> ObjectName:
    """As `parse_name`; ValueError instead of None."""
    parsed = parse_name(name)
    if parsed is None:
        raise ValueError(f"not the name of an object of this store: {name!r}")
    return parsed

"""Bytes of a context's objects. Pure: buffers in, values out.

The image object (`-i`):

    0          128                            image_offset               image_offset + image_bytes
    | header   | MessagePack Envelope | zeros | thin image, as the engine writes it                  |
      128 bytes                         up to a multiple of 4096

The KV object (`-k`) has no header, because its blocks must start on page boundaries from 0: its checksums lie in the image.

Header, little-endian:

    0   8  magic                      80  32  SHA-256 of the pool's name
    8   4  version                   112  16  BLAKE2b over everything before image_offset but the state word and this
   12   4  state: writing, sealed
   16   8  bytes of the Envelope
   24   8  image_offset
   32   8  image_bytes
   40   4  numerics    44  4  zero
   48  32  fingerprint of the model

An object is written with the state "writing"; the word "sealed" is stored last, so that whoever finds it set finds everything
else in place. Sizes follow from geometry and token count alone, so the broker reserves them before the work is done.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Struct

from geist_pool.errors import ImageDamaged, Internal
from geist_pool.protocol import Envelope, Geometry, Grant

PAGE: Final = 4096
BLOCK: Final = 64  # positions in a KV block
MAGIC: Final = b"GEISTCTX"
VERSION: Final = 1
HEADER_BYTES: Final = 128
STATE_OFFSET: Final = 12
WRITING: Final = 0x54495257
SEALED: Final = 0x4C414553
MAX_ENVELOPE: Final = 64 << 20  # far above what a request may carry

_FIELDS: Final = struct.Struct("<8sIIQQQII32s32s16s")
_SUM_OFFSET: Final = 112
_SUM_BYTES: Final = 16

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Envelope)

assert _FIELDS.size == HEADER_BYTES


class Stored(Struct, frozen=True):
    """What stands before an image."""

    envelope: Envelope
    pool: bytes  # names.pool_digest
    fingerprint: str  # hexadecimal
    numerics: int
    image_offset: int
    image_bytes: int


def up(n: int) -> int:
    """Rounds up to a whole page."""
    return (n + PAGE - 1) // PAGE * PAGE


# ---- sizes


def envelope_bytes(envelope: Envelope) -> int:
    """Bytes of header and envelope in front of the image: a multiple of 4096."""
    return up(HEADER_BYTES + len(_encoder.encode(envelope)))


def image_bytes(geometry: Geometry, n_tokens: int) -> int:
    """Bytes of a thin image over `n_tokens` positions, from the formula at geist_image_geometry in geist.h."""
    blocks, rest = divmod(n_tokens, BLOCK)
    return (
        geometry.header_bytes
        + up(4 * n_tokens)
        + up(4 * geometry.n_vocab)
        + up(geometry.recurrent_bytes)
        + up(rest * geometry.kv_bytes_per_token)
        + up(8 * blocks)
    )


def image_object_bytes(geometry: Geometry, n_tokens: int, envelope: Envelope) -> int:
    """Bytes of the whole image object."""
    return envelope_bytes(envelope) + image_bytes(geometry, n_tokens)


def kv_object_bytes(geometry: Geometry, n_blocks: int) -> int:
    """Bytes of the object that holds `n_blocks` whole KV blocks; 0 means that there is none."""
    return n_blocks * geometry.kv_block_bytes


def whole_blocks(n_tokens: int) -> int:
    """Whole KV blocks of `n_tokens` positions."""
    return n_tokens // BLOCK


def cut_to(grant: Grant, n_tokens: int, geometry: Geometry, answer: str) -> Grant:
    """The grant with the true sizes of `n_tokens` tokens, and `answer` where its messages have a place for it; one that is no
    ceiling stays as it is.

    Internal if that is more than was granted.
    """
    if not grant.ceiling:
        return grant
    ref = grant.ref
    n_blocks = whole_blocks(n_tokens) - ref.first_block
    messages = grant.envelope.messages
    if messages:
        messages = (*messages[:-1], msgspec.structs.replace(messages[-1], content=answer))
    envelope = msgspec.structs.replace(grant.envelope, n_tokens=n_tokens, n_blocks=n_blocks, messages=messages)
    true = msgspec.structs.replace(
        ref,
        image_bytes=image_object_bytes(geometry, n_tokens, envelope),
        kv=ref.kv if n_blocks else None,
        kv_bytes=kv_object_bytes(geometry, n_blocks),
        n_blocks=n_blocks,
        n_tokens=n_tokens,
    )
    # The sum grows with the length; the image alone does not: a whole block moves from it to the KV object.
    too_much = true.image_bytes + true.kv_bytes > ref.image_bytes + ref.kv_bytes
    if too_much or n_tokens > ref.n_tokens or n_blocks < 0 or (n_blocks and ref.kv is None):
        raise Internal(
            f"context {ref.id}: granted are {ref.n_tokens} tokens in {ref.image_bytes} + {ref.kv_bytes} bytes, "
            f"needed {n_tokens} in {true.image_bytes} + {true.kv_bytes}",
            context=ref.id,
        )
    return Grant(ref=true, envelope=envelope)


# ---- header and envelope


def pack(envelope: Envelope, *, pool: bytes, fingerprint: str, numerics: int, image: int) -> bytes:
    """Header and envelope in front of an image of `image` bytes, in the state "writing"; `envelope_bytes(envelope)` long.

    `pool` is names.pool_digest, `fingerprint` 64 hexadecimal digits.
    """
    body = _encoder.encode(envelope)
    offset = up(HEADER_BYTES + len(body))
    key = bytes.fromhex(fingerprint)
    if len(pool) != 32 or len(key) != 32:
        raise ValueError("pool digest and fingerprint are 32 bytes each")
    fields = (MAGIC, VERSION, WRITING, len(body), offset, image, numerics, 0, key, pool)
    front = bytearray(offset)
    _FIELDS.pack_into(front, 0, *fields, bytes(_SUM_BYTES))
    front[HEADER_BYTES : HEADER_BYTES + len(body)] = body
    front[_SUM_OFFSET : _SUM_OFFSET + _SUM_BYTES] = _checksum(memoryview(front))
    return bytes(front)


def state_bytes(state: int) -> bytes:
    """The state word as it is stored at STATE_OFFSET."""
    return struct.pack("<I", state)


def parse(data: memoryview, *, what: str) -> Stored:
    """Reads and checks what stands before an image. `data` is the whole object, `what` its name for the words of an error.

    Raises ImageDamaged for anything but a sealed object of this version whose sizes and checksum agree.
    """
    return parse_front(data, len(data), what=what)


def front_bytes(start: bytes, *, what: str) -> int:
    """How many bytes of an object `parse_front` needs, from its first HEADER_BYTES. ImageDamaged where they are no header."""
    if len(start) < HEADER_BYTES:
        raise ImageDamaged(f"{what} is cut: {len(start)} bytes are no header", object=what)
    magic, version, state, body_bytes, offset, *_ = _FIELDS.unpack_from(start, 0)
    if magic != MAGIC:
        raise ImageDamaged(f"{what} does not begin with an envelope", object=what)
    if version != VERSION:
        raise ImageDamaged(f"{what} has envelope version {version}; this is version {VERSION}", object=what)
    if state == WRITING:
        raise ImageDamaged(f"{what} was never finished", object=what)
    if state != SEALED:
        raise ImageDamaged(f"{what} has the unknown state {state:#010x}", object=what)
    if body_bytes > MAX_ENVELOPE or offset != up(HEADER_BYTES + body_bytes):
        raise ImageDamaged(f"{what}: an envelope of {body_bytes} bytes and an image at {offset} do not agree", object=what)
    return int(offset)


def parse_front(data: memoryview, n_bytes: int, *, what: str) -> Stored:
    """As `parse`, from at least the first `front_bytes` of an object of `n_bytes` bytes."""
    offset = front_bytes(bytes(data[:HEADER_BYTES]), what=what)
    _, _, _, body_bytes, _, image, numerics, zero, key, pool, checksum = _FIELDS.unpack_from(data, 0)
    if offset > n_bytes or image != n_bytes - offset:
        raise ImageDamaged(
            f"{what} is {n_bytes} bytes; an image of {image} bytes at {offset} does not fill it exactly", object=what
        )
    if zero != 0 or checksum != _checksum(data[:offset]):
        raise ImageDamaged(f"{what}: the checksum of header and envelope is wrong", object=what)
    try:
        envelope = _decoder.decode(data[HEADER_BYTES : HEADER_BYTES + body_bytes])
    except msgspec.MsgspecError as error:  # right checksum, wrong content: written by another program
        raise ImageDamaged(f"{what}: the envelope cannot be read: {error}", object=what) from error
    _check(envelope, what)
    return Stored(envelope=envelope, pool=pool, fingerprint=key.hex(), numerics=numerics, image_offset=offset, image_bytes=image)


def _check(envelope: Envelope, what: str) -> None:
    first, n = envelope.first_block, envelope.n_blocks
    if envelope.n_tokens < 1 or first < 0 or n < 0 or first + n != whole_blocks(envelope.n_tokens):
        raise ImageDamaged(f"{what}: blocks [{first}, {first + n}) are not the end of {envelope.n_tokens} tokens", object=what)
    if first > 0 and envelope.parent is None:
        raise ImageDamaged(f"{what} has no parent but begins at block {first}", object=what)
    last = envelope.chain[-1] if envelope.chain else None
    if (last.id if last is not None else None) != envelope.parent:
        raise ImageDamaged(f"{what}: its ancestors do not end with its parent", object=what)
    at = 0
    for ref in envelope.chain:
        if ref.first_block != at or ref.n_blocks != whole_blocks(ref.n_tokens) - at:
            raise ImageDamaged(f"{what}: the blocks of its ancestors do not follow one another", object=what)
        at += ref.n_blocks
    if at != first:
        raise ImageDamaged(f"{what}: its ancestors have {at} blocks and its own begin at {first}", object=what)


def _checksum(front: memoryview) -> bytes:
    parts: Iterable[memoryview] = (
        front[:STATE_OFFSET],
        front[STATE_OFFSET + 4 : _SUM_OFFSET],
        front[_SUM_OFFSET + _SUM_BYTES :],
    )
    digest = hashlib.blake2b(digest_size=_SUM_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()

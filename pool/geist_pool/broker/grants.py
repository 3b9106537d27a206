"""What a context that is to be made will be called, and how much memory it takes. Pure."""

from __future__ import annotations

import msgspec

from geist_pool.broker.entries import Entry, More
from geist_pool.protocol import Chain, ContextRef, Envelope, Geometry, Grant, Message
from geist_pool.store import layout, names

ANSWER_ROLE = "assistant"


def plan(
    pool: str, envelope: Envelope, base: Entry | None, above: Chain, geometry: Geometry, *, attempt: int, more: More | None
) -> Grant:
    """The grant for a context on `base`, whose chain is `above`. Of the envelope's block figures, parent and chain only what
    follows from `base` and the token count is kept. With `more` the sizes are upper bounds."""
    first = 0 if base is None else layout.whole_blocks(base.n_tokens)
    least = envelope.n_tokens
    most = least if more is None else least + more.tokens
    envelope = msgspec.structs.replace(
        envelope,
        parent=None if base is None else base.id,
        n_tokens=most,
        first_block=first,
        n_blocks=layout.whole_blocks(most) - first,
        chain=above,
    )
    kv_bytes = layout.kv_object_bytes(geometry, envelope.n_blocks)
    # A thin image holds the partial last block, so one token more may make it smaller: of 64 lengths in a row one is largest.
    image_bytes = max(layout.image_bytes(geometry, n) for n in range(max(least, most - layout.BLOCK + 1), most + 1))
    image_bytes += layout.envelope_bytes(envelope)
    if more is not None and envelope.messages:
        image_bytes += layout.up(more.text_bytes + 8)  # and a longer length in front of it
    ref = ContextRef(
        id=envelope.id,
        image=names.image_name(pool, envelope.id, attempt),
        image_bytes=image_bytes,
        kv=names.kv_name(pool, envelope.id, attempt) if kv_bytes else None,
        kv_bytes=kv_bytes,
        first_block=first,
        n_blocks=envelope.n_blocks,
        n_tokens=most,
    )
    return Grant(ref=ref, envelope=envelope, ceiling=more is not None)


def with_place_for_answer(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation with the turn that is about to be generated."""
    return (*messages, Message(ANSWER_ROLE, ""))


def with_answer(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """The conversation whose last turn, until now empty, is `text`."""
    return (*messages[:-1], Message(ANSWER_ROLE, text))

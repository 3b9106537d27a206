"""A context in the broker's books: its two objects and who may have them mapped. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from geist_pool.broker.content import ID_BYTES
from geist_pool.broker.text_types import TemplateArgs
from geist_pool.protocol import Chain, ContextInfo, ContextRef, Envelope, Message

EntryState = Literal["granted", "sealed", "gone"]
"""granted: a worker may be writing it; sealed: findable; gone: not findable, its objects go as soon as nobody needs them."""


class More(Struct, frozen=True):
    """How far beyond the envelope's figures a context may come: the length of an answer is not known before it is there.

    tokens: at most so many behind the envelope's. text_bytes: of its text in the last of the envelope's messages, at most.
    """

    tokens: int
    text_bytes: int


class Piece:
    """One object. Its memory is in use while it has a name or somebody has it mapped.

    mappers: worker -> how many Forgets for the context had been sent to it when it was last told of this object. The k-th
    Forgotten from a worker is the answer to the k-th Forget (only one is unanswered at a time), so it clears marks below k and
    leaves what came later.
    """

    __slots__ = ("counted", "linked", "mappers", "n_bytes", "name", "nameless")

    def __init__(self, name: str, n_bytes: int) -> None:
        self.name = name
        self.n_bytes = n_bytes
        self.linked = True
        self.mappers: dict[str, int] = {}
        self.counted = False  # in the directory's sum of bytes
        self.nameless = False  # in the sum of those that only mappings keep

    @property
    def alive(self) -> bool:
        return self.linked or bool(self.mappers)


class Entry:
    """One context. `tokens` are its ids from position 0, packed."""

    __slots__ = (
        "attached",
        "attempt",
        "chain",
        "children",
        "envelope",
        "expires",
        "forgets",
        "forgotten",
        "image",
        "kv",
        "last_used",
        "leases",
        "mapped",
        "more",
        "names",
        "parent",
        "pinned",
        "reference",
        "state",
        "tokens",
    )

    def __init__(self, ref: ContextRef, envelope: Envelope, tokens: bytes, parent: Entry | None, state: EntryState) -> None:
        self.state: EntryState = state
        self.envelope = envelope
        self.tokens = tokens
        self.parent = parent  # kept in the directory at least as long as this entry is attached to it
        self.attached = True  # it needs its ancestors' blocks: until it and all its descendants are gone
        self.children: set[str] = set()  # attached entries, of any state
        self.image = Piece(ref.image, ref.image_bytes)
        self.kv = None if ref.kv is None else Piece(ref.kv, ref.kv_bytes)
        self.attempt = 1
        self.more: More | None = None  # granted with a ceiling
        self.reference: ContextRef | None = None  # made once
        self.chain: Chain | None = None  # made once
        self.names: list[str] = []  # that lead here now; the last one bound is the one shown
        self.leases: set[str] = set()  # keys of jobs
        self.last_used = envelope.created
        self.expires = None if envelope.ttl_s is None else envelope.created + envelope.ttl_s
        self.pinned = envelope.pin
        self.mapped: set[str] = set()  # workers that said so
        self.forgets: dict[str, int] = {}  # Forgets sent, by worker
        self.forgotten: dict[str, int] = {}  # and answered

    @property
    def id(self) -> str:
        return self.envelope.id

    @property
    def space(self) -> str:
        return self.envelope.space

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // ID_BYTES

    @property
    def messages(self) -> tuple[Message, ...] | None:
        return self.envelope.messages

    @property
    def template_args(self) -> TemplateArgs:
        return self.envelope.template_args

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return (self.image,) if self.kv is None else (self.image, self.kv)

    @property
    def own_bytes(self) -> int:
        return sum(p.n_bytes for p in self.pieces)

    @property
    def evictable(self) -> bool:
        return self.state == "sealed" and not self.pinned and not self.leases

    def ref(self) -> ContextRef:
        """Once the context is sealed: its objects do not change any more."""
        assert self.state != "granted"
        if self.reference is None:
            self.reference = ContextRef(
                id=self.id,
                image=self.image.name,
                image_bytes=self.image.n_bytes,
                kv=None if self.kv is None else self.kv.name,
                kv_bytes=0 if self.kv is None else self.kv.n_bytes,
                first_block=self.envelope.first_block,
                n_blocks=self.envelope.n_blocks,
                n_tokens=self.n_tokens,
            )
        return self.reference

    def info(self) -> ContextInfo:
        return ContextInfo(
            id=self.id,
            name=self.names[-1] if self.names else None,
            space=self.space,
            n_tokens=self.n_tokens,
            parent=self.envelope.parent,
            bytes=self.own_bytes,
            created=self.envelope.created,
            last_used=self.last_used,
            expires=self.expires,
            pinned=self.pinned,
            leases=len(self.leases),
            names=tuple(self.names),
        )

"""What happens to the broker's machine, and what it wants done: plain values.

The loop turns sockets, descriptors and the clock into events; the machine answers each with actions; the loop performs them in
order. Nothing here does anything.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from geist_pool.broker.text_types import TextDone, TextJob
from geist_pool.errors import GeistPoolError
from geist_pool.protocol import ContextRef, Envelope, FromWorker, Geometry, Reply, Request, ToWorker

Route = tuple[bytes, ...]
"""The envelope of a message: the peer, then whatever stood before `GP1`. Echoed verbatim in front of every reply."""


class AdoptedContext(Struct, frozen=True):
    """A sound context found in shared memory, with its token ids from position 0."""

    envelope: Envelope
    ref: ContextRef
    tokens: tuple[int, ...]


class Binding(Struct, frozen=True):
    """What a context is called now, and how long it is kept, where its envelope may say something else."""

    context: str  # its id
    names: tuple[str, ...]  # the last one bound is the last
    pinned: bool
    expires: float | None  # Unix seconds


class Bindings(Struct, frozen=True):
    """Of all findable contexts that are called something or were meant to be; what is missing here is as its envelope says.

    dropped: ids of contexts that are not findable any more, but whose images are still there.
    """

    contexts: tuple[Binding, ...]
    dropped: tuple[str, ...] = ()


class SavedHead(Struct, frozen=True):
    """What a saved file says of itself in front of its image."""

    envelope: Envelope
    n_tokens: int
    fingerprint: str  # of the model, hexadecimal
    n_bytes: int  # of the file
    written: float  # Unix seconds


class SavedFile(Struct, frozen=True):
    stem: str  # its name without suffix
    head: SavedHead


# ---- events ----------------------------------------------------------------------------------------------------------


class Received(Struct, frozen=True):
    """A client's message. `request` is what it says, or why it says nothing that can be understood."""

    route: Route
    request_id: bytes
    request: Request | GeistPoolError
    can_stream: bool  # False where the envelope is that of a REQ socket, which takes one reply only
    json: bool  # coding of the request, and so of its replies
    digest: bytes = b""  # hash of the body: the same request again has the same

    @property
    def peer(self) -> bytes:
        return self.route[0]


class TextReady(Struct, frozen=True):
    done: TextDone


class WorkerSaid(Struct, frozen=True):
    worker: str
    message: FromWorker


class WorkerLost(Struct, frozen=True):
    """The process is dead, and with it all its mappings."""

    worker: str
    why: str


class ClientGone(Struct, frozen=True):
    """Its connection has ended, or it does not read what it asked for; then only short last words are kept for it.

    dropped: messages that were waiting for it and are lost.
    """

    peer: bytes
    why: Literal["disconnected", "slow"] = "disconnected"
    dropped: int = 0


class Tick(Struct, frozen=True):
    """Time passed."""


class Adopted(Struct, frozen=True):
    """Answer to AdoptStore. `contexts` has parents before children; `unlink` names this pool's other objects; `bindings` those
    that were kept last, if they could be read."""

    contexts: tuple[AdoptedContext, ...]
    unlink: tuple[str, ...]
    bindings: Bindings | None = None


class Peeked(Struct, frozen=True):
    """Answer to PeekSaved."""

    job: str
    head: SavedHead | GeistPoolError


class SavedListed(Struct, frozen=True):
    """Answer to ListSaved; files that are no saved contexts are left out."""

    job: str
    files: tuple[SavedFile, ...] | GeistPoolError


class Dropped(Struct, frozen=True):
    """Messages that nothing could be done with."""

    count: int = 1


class Stop(Struct, frozen=True):
    """The pool is to end."""


Event = Received | TextReady | WorkerSaid | WorkerLost | ClientGone | Tick | Adopted | Peeked | SavedListed | Dropped | Stop

# ---- actions ---------------------------------------------------------------------------------------------------------


class SendReply(Struct, frozen=True):
    route: Route
    request_id: bytes
    reply: Reply
    json: bool


class SendWorker(Struct, frozen=True):
    worker: str
    message: ToWorker


class StartText(Struct, frozen=True):
    job: TextJob


class Unlink(Struct, frozen=True):
    """Remove these names from shared memory; one that is not there is no error."""

    names: tuple[str, ...]


class KillWorker(Struct, frozen=True):
    """SIGKILL; a WorkerLost follows once the process is dead."""

    worker: str
    why: str


class AdoptStore(Struct, frozen=True):
    """Look through shared memory for contexts of this model; answered by Adopted."""

    fingerprint: str
    numerics: int
    geometry: Geometry


class KeepBindings(Struct, frozen=True):
    """Write this down for the next life, in place of what was written before."""

    bindings: Bindings


class PeekSaved(Struct, frozen=True):
    """Look at the head of a saved context's file; answered by Peeked."""

    job: str
    path: str


class ListSaved(Struct, frozen=True):
    """Look at the saved contexts in a directory, which may be missing; answered by SavedListed."""

    job: str
    directory: str


class MakeDirectory(Struct, frozen=True):
    """Make this directory, for this user alone, before what follows is done; its parent is there."""

    path: str


class Log(Struct, frozen=True):
    """Counts and ids, never text of clients."""

    event: str
    fields: dict[str, str | int | float | None] = {}


Action = (
    SendReply
    | SendWorker
    | StartText
    | Unlink
    | KillWorker
    | AdoptStore
    | KeepBindings
    | PeekSaved
    | ListSaved
    | MakeDirectory
    | Log
)

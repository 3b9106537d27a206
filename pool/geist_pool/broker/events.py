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


# ---- events ----------------------------------------------------------------------------------------------------------


class Received(Struct, frozen=True):
    """A client's message. `request` is what it says, or why it says nothing that can be understood."""

    route: Route
    request_id: bytes
    request: Request | GeistPoolError
    can_stream: bool  # False where the envelope is that of a REQ socket, which takes one reply only
    json: bool  # coding of the request, and so of its replies

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
    """No reply will reach this client any more. `dropped` counts messages that were waiting for it."""

    peer: bytes
    why: Literal["disconnected", "slow"] = "disconnected"
    dropped: int = 0


class Tick(Struct, frozen=True):
    """Time passed."""


class Adopted(Struct, frozen=True):
    """Answer to AdoptStore. `contexts` has parents before children; `unlink` names this pool's other objects."""

    contexts: tuple[AdoptedContext, ...]
    unlink: tuple[str, ...]


class Stop(Struct, frozen=True):
    """The pool is to end."""


Event = Received | TextReady | WorkerSaid | WorkerLost | ClientGone | Tick | Adopted | Stop

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


class Log(Struct, frozen=True):
    """Counts and ids, never text of clients."""

    event: str
    fields: dict[str, str | int | float | None] = {}


Action = SendReply | SendWorker | StartText | Unlink | KillWorker | AdoptStore | Log

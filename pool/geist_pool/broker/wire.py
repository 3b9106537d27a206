"""Frames to requests, replies to frames. Pure: no socket here.

Frame 0 is the peer; everything from there up to the first `GP1` behind it is the envelope, which goes back verbatim. So REQ
(`[peer, "", GP1, ...]`), DEALER (`[peer, GP1, ...]`) and REQ_CORRELATE (`[peer, 4 bytes, "", GP1, ...]`) all work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from geist_pool.broker.events import Received, Route, SendReply
from geist_pool.errors import BadRequest, GeistPoolError, Internal
from geist_pool.protocol import LIMITS, MAGIC, Reply, Request, error_body

FRAMES_MAX: Final = LIMITS.envelope_frames + 3
"""More frames than any sound message has."""

_json_requests: Final = msgspec.json.Decoder(Request)
_packed_requests: Final = msgspec.msgpack.Decoder(Request)
_json: Final = msgspec.json.Encoder()
_packed: Final = msgspec.msgpack.Encoder()
_PLACE: Final = re.compile(r" - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)


class Hopeless(Struct, frozen=True):
    """Frames that not even a refusal can be addressed by."""

    why: str


def read_message(frames: Sequence[bytes]) -> Received | Hopeless:
    """`frames` as a ROUTER gives them, the first FRAMES_MAX + 1 at most; whatever is wrong with them is in the result."""
    try:
        at = frames.index(MAGIC, 1)
    except ValueError:
        return Hopeless(f"{len(frames)} frames without {MAGIC.decode()}")
    if at > LIMITS.envelope_frames:
        return Hopeless(f"an envelope of {at} frames; at most {LIMITS.envelope_frames} are taken")
    route: Route = tuple(frames[:at])
    rest = frames[at + 1 :]
    request_id = rest[0] if rest else b""
    body = rest[1] if len(rest) > 1 else b""
    is_json = body.startswith(b"{")
    request: Request | GeistPoolError
    if not 1 <= len(request_id) <= LIMITS.request_id_bytes:
        request = BadRequest(f"a request id is 1 to {LIMITS.request_id_bytes} bytes, not {len(request_id)}", path="id")
        request_id = request_id[: LIMITS.request_id_bytes]
    elif len(rest) != 2:
        request = BadRequest(f"behind {MAGIC.decode()} come a request id and a body, not {len(rest)} frames")
    else:
        request = decode_request(body)
    return Received(route, request_id, request, can_stream=b"" not in route[1:], json=is_json)


def decode_request(body: bytes) -> Request | GeistPoolError:
    """The request, or a BadRequest that says where it is none."""
    if len(body) > LIMITS.body_bytes:
        return BadRequest(f"a body of {len(body)} bytes; at most {LIMITS.body_bytes} are taken", path="body")
    decoder = _json_requests if body.startswith(b"{") else _packed_requests
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        words = str(error)
        place = _PLACE.search(words)
        return BadRequest(words[: place.start()] if place else words, path=(place[1] or None) if place else None)
    except (msgspec.DecodeError, UnicodeError) as error:
        return BadRequest(f"the body is neither JSON nor MessagePack: {error}", path="body")
    except RecursionError:
        return BadRequest("the body is nested too deeply", path="body")


def reply_frames(action: SendReply) -> list[bytes]:
    """All frames of a reply, the envelope first; in the coding of its request."""
    return [*action.route, MAGIC, action.request_id, _encode(action.reply, json=action.json)]


def _encode(reply: Reply, *, json: bool) -> bytes:
    encoder = _json if json else _packed
    try:
        return encoder.encode(reply)
    except (UnicodeError, TypeError, ValueError, OverflowError) as error:  # our fault; the request still ends
        return encoder.encode(Reply(ok=False, error=error_body(Internal(f"the reply cannot be written: {error}"))))

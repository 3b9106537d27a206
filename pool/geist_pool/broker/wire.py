"""Frames to requests, replies to frames. Pure: no socket here.

Frame 0 is the peer; everything from there up to the first `GP1` behind it is the envelope, which goes back verbatim. So REQ
(`[peer, "", GP1, ...]`), DEALER (`[peer, GP1, ...]`) and REQ_CORRELATE (`[peer, 4 bytes, "", GP1, ...]`) all work.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from geist_pool.broker.events import Received, Route, SendReply
from geist_pool.errors import BadRequest, Cancelled, GeistPoolError, Internal
from geist_pool.protocol import LIMITS, MAGIC, Reply, Request, error_body

FRAMES_MAX: Final = LIMITS.envelope_frames + 3
"""More frames than any sound message has."""

_json_requests: Final = msgspec.json.Decoder(Request)
_packed_requests: Final = msgspec.msgpack.Decoder(Request)
_json: Final = msgspec.json.Encoder()
_packed: Final = msgspec.msgpack.Encoder()
_ESCAPES: Final = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)|\xed[\xa0-\xbf][\x80-\xbf]", re.DOTALL)
"""Of JSON: an escape of four digits, any other escape, or a surrogate written out in (unsound) UTF-8."""
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
    digest = b""
    if not 1 <= len(request_id) <= LIMITS.request_id_bytes:
        request = BadRequest(f"a request id is 1 to {LIMITS.request_id_bytes} bytes, not {len(request_id)}", path="id")
        request_id = request_id[: LIMITS.request_id_bytes]
    elif len(rest) != 2:
        request = BadRequest(f"behind {MAGIC.decode()} come a request id and a body, not {len(rest)} frames")
    else:
        request = decode_request(body)
        digest = hashlib.blake2b(body, digest_size=16).digest()
    return Received(route, request_id, request, can_stream=b"" not in route[1:], json=is_json, digest=digest)


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
        lone = _lone_surrogate(body)
        if lone is not None:
            return BadRequest(f"a lone surrogate in a string of the body (byte {lone}): no text has one", path="body", byte=lone)
        return BadRequest(f"the body is neither JSON nor MessagePack: {error}", path="body")
    except RecursionError:
        return BadRequest("the body is nested too deeply", path="body")


def _lone_surrogate(body: bytes) -> int | None:
    """The byte at which the first half of a pair of surrogates stands alone, or None."""
    high: int | None = None  # where a first half has just ended
    for found in _ESCAPES.finditer(body):
        code = None if found[1] is None else int(found[1], 16)
        if found[0][:1] == b"\xed" and high is None:
            return found.start()
        if high is not None:
            if code is None or not 0xDC00 <= code < 0xE000 or found.start() != high:
                return high - 6
            high = None
        elif code is not None and 0xDC00 <= code < 0xE000:
            return found.start()
        elif code is not None and 0xD800 <= code < 0xDC00:
            high = found.end()
    return None if high is None else high - 6


def reply_frames(action: SendReply) -> list[bytes]:
    """All frames of a reply, the envelope first; in the coding of its request."""
    return [*action.route, MAGIC, action.request_id, _encode(action.reply, json=action.json)]


def unread_frames(action: SendReply) -> list[bytes]:
    """Instead of an answer that is too much to be kept for a client that does not read: the request still ends."""
    error = Cancelled("the answer was not read and is not kept any longer")
    short = Reply(ok=False, error=error_body(error))
    return [*action.route, MAGIC, action.request_id, _encode(short, json=action.json)]


def _encode(reply: Reply, *, json: bool) -> bytes:
    encoder = _json if json else _packed
    try:
        return encoder.encode(reply)
    except (UnicodeError, TypeError, ValueError, OverflowError) as error:  # our fault; the request still ends
        return encoder.encode(Reply(ok=False, error=error_body(Internal(f"the reply cannot be written: {error}"))))

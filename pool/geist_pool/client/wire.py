"""Between a request and its answer: ids, inboxes, when to send again, when to give up. Pure: frames and times come in, frames
and decisions go out, so that both clients behave alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from geist_pool import protocol
from geist_pool.client.calls import Call, encoded, result_of
from geist_pool.errors import GeistPoolError, NoAnswer, ProtocolError
from geist_pool.protocol import Cancel, GenerateChunk, GenerateResult, Reply, Request, Sample, Story, TokenLogprob

CONNECT_TIMEOUT_S: Final = 5.0
RETRIES: Final = 2
RESEND_AFTER_S: Final = 30.0
LINGER_MS: Final = 200  # how long a closing client waits for its last cancels to leave
SOCKET_OPTIONS: Final = {
    "linger": LINGER_MS,
    "immediate": 1,  # nothing is queued for a pool that is not there
    "heartbeat_ivl": 5_000,  # ms; so that a pool that is gone without a word (tcp, a stopped process) is noticed
    "heartbeat_timeout": 30_000,  # ms
}

Frames = tuple[bytes, bytes, bytes]
_reply_decoder: Final = msgspec.msgpack.Decoder(Reply)


class SendAgain:
    """A decision: send the flight's frames again, then ask again."""


SEND_AGAIN: Final = SendAgain()


class Flight:
    """One request under way. `on_change` is called when its next step may have changed."""

    __slots__ = ("_body", "about_ids", "at_pool", "inbox", "losses", "lost", "on_change", "rid", "sent")

    def __init__(self, rid: bytes, request: Request) -> None:
        self.rid: Final = rid
        self._body = encoded(request)
        self.about_ids: Final = isinstance(request, Cancel | Story)  # its field "id" is another's
        self.inbox: deque[Reply] = deque()
        self.sent = 0  # times
        self.at_pool = False  # whether the pool may be at work for it
        self.lost = False  # the connection that it was last sent on broke
        self.losses = 0  # times
        self.on_change: Callable[[], None] = _nothing

    @property
    def frames(self) -> Frames:
        return protocol.MAGIC, self.rid, self._body

    def mark_sent(self) -> None:
        """To be called when all frames are with the socket."""
        self.sent += 1
        self.at_pool = True
        self.lost = False


class Desk:
    """All flights of one client, and what is known about them.

    prefix: new for every client, so that two of them never use one id. address: for messages only.
    retries: how many lost connections a request outlives; 0: nothing is ever sent again. resend_after: seconds of silence after
    which a request is sent again, then twice as many, and so on.
    """

    def __init__(self, address: str, prefix: str, retries: int, resend_after: float) -> None:
        self.discarded = 0  # replies to requests that were given up, and frames that are no reply
        self.closed = False
        self._address = address
        self._prefix = prefix
        self._retries = retries
        self._resend_after = resend_after
        self._count = 0
        self._flights: dict[bytes, Flight] = {}

    def open(self, request: Request) -> Flight:
        """A new flight, not yet sent. Raises NoAnswer on a closed client, BadRequest for what cannot be encoded."""
        if self.closed:
            raise NoAnswer("this client is closed")
        flight = Flight(self._new_id(), request)
        self._flights[flight.rid] = flight
        return flight

    def end(self, flight: Flight, space: str) -> Frames | None:
        """Nobody waits for this flight any more; what still comes is discarded. Where the pool may be at work for it: the frames
        that tell it to stop, to be sent without waiting and without an answer."""
        if self._flights.pop(flight.rid, None) is None or not flight.at_pool or flight.lost:
            return None
        return protocol.MAGIC, self._new_id(), encoded(Cancel(space=space, id=flight.rid.decode()))

    def close(self, space: str) -> list[Frames]:
        """Ends all, and opens no more."""
        self.closed = True
        open_flights = list(self._flights.values())
        told = [self.end(flight, space) for flight in open_flights]
        for flight in open_flights:
            flight.on_change()
        return [frames for frames in told if frames is not None]

    def take(self, frames: Sequence[bytes]) -> None:
        """Sorts a message into the inbox of its flight; what belongs to none is counted and dropped."""
        flight = self._flights.get(frames[1]) if len(frames) == 3 and frames[0] == protocol.MAGIC else None
        if flight is None:
            self.discarded += 1
            return
        try:
            reply = _reply_decoder.decode(frames[2])
        except msgspec.DecodeError as e:
            wrong = protocol.error_body(ProtocolError(f"the pool's answer cannot be understood: {e}"))
            reply = Reply(ok=False, error=wrong)
        of_repeat = flight.sent > 1 and not flight.about_ids
        if of_repeat and reply.error is not None and (reply.error.code, reply.error.path) == ("bad_request", "id"):
            return  # this id is in flight: the first sending is still at work, and will have its answer
        flight.inbox.append(reply)
        flight.on_change()

    def connection_lost(self) -> None:
        """Everything sent and not yet answered will have no answer on this connection. Take in what has arrived first."""
        for flight in self._flights.values():
            if flight.at_pool and not flight.lost:
                flight.lost = True
                flight.losses += 1
                flight.on_change()

    def no_pool(self, flight: Flight, waited: float) -> NoAnswer:
        """The error for a flight that found no connection for so many seconds."""
        if flight.sent:
            return NoAnswer(f"the pool at {self._address} went away before it answered, and was not back within {waited:g} s")
        return NoAnswer(f"there is no pool at {self._address} (waited {waited:g} s)")

    def takes_no_more(self) -> NoAnswer:
        return NoAnswer(f"the pool at {self._address} takes no more messages")

    def _new_id(self) -> bytes:
        self._count += 1
        return f"{self._prefix}-{self._count}".encode()

    def wait(self, flight: Flight, timeout: float | None, now: float) -> Wait:
        """Begins to wait for the flight's next reply, for `timeout` seconds at most, None: for ever."""
        return Wait(flight, timeout, self._resend_after, now)

    def step(self, wait: Wait, now: float) -> Reply | SendAgain | float | None:
        """What to do now: hand out the reply; send again; or wait, for so many seconds or (None) until something happens.

        Raises NoAnswer when it is time to give up.
        """
        flight = wait.flight
        if flight.inbox:
            reply = flight.inbox.popleft()
            if reply.final:
                del self._flights[flight.rid]
            return reply
        if flight.rid not in self._flights:
            raise NoAnswer("this client is closed" if self.closed else "this request has ended")
        left = None if wait.until is None else wait.until - now
        if left is not None and left <= 0:
            raise NoAnswer(f"the pool at {self._address} gave no answer within {wait.timeout:g} s")
        if flight.lost:
            if flight.losses > self._retries:
                raise NoAnswer(f"the pool at {self._address} went away before it answered")
            wait.quiet_since = now
            return SEND_AGAIN
        if not self._retries:
            return left
        quiet = wait.quiet_since + wait.patience - now
        if quiet <= 0:
            wait.quiet_since = now
            wait.patience *= 2
            return SEND_AGAIN
        return quiet if left is None else min(left, quiet)


class Wait:
    """One wait for one reply."""

    __slots__ = ("flight", "patience", "quiet_since", "timeout", "until")

    def __init__(self, flight: Flight, timeout: float | None, patience: float, now: float) -> None:
        self.flight = flight
        self.timeout = timeout
        self.until = None if timeout is None else now + timeout
        self.patience = patience  # doubled with every sending
        self.quiet_since = now

    def at_most(self, seconds: float, now: float) -> float:
        """So many seconds, or fewer where the wait ends before."""
        return seconds if self.until is None else max(0.0, min(seconds, self.until - now))


class Reading:
    """What has been read of a stream. Sent again, a stream may begin anew; the reader gets every token and character once."""

    def __init__(self, call: Call[GenerateResult]) -> None:
        self.result: GenerateResult | None = None
        self.error: GeistPoolError | None = None
        self.ready: deque[GenerateChunk] = deque()  # for the reader, before anything else
        self._call = call
        self._seen: dict[int, _Seen] = {}  # by sample

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.result is not None or self.error is not None

    def take(self, reply: Reply) -> None:
        """Puts what is new in a reply into `ready`. Raises the request's error, or ProtocolError for what is no stream."""
        if reply.ok and not reply.final:
            self._new_of(result_of(reply, GenerateChunk))
            return
        result = self._call.unpack(reply)
        answers: Sequence[GenerateResult | Sample] = result.samples or (result,)
        for i, answer in enumerate(answers):  # what no chunk brought: a pool may answer from memory
            if i in self._seen:
                self._seen[i].start_anew()
            self._new_of(GenerateChunk(0, answer.tokens, answer.text, answer.logprobs, sample=i))
        self.result = result

    def _new_of(self, chunk: GenerateChunk) -> None:
        seen = self._seen.setdefault(chunk.sample, _Seen())
        if chunk.index < seen.heard_tokens:
            seen.start_anew()
        new = seen.new_of(chunk)
        if new.tokens or new.text:
            self.ready.append(new)


class _Seen:
    """How much of one sample went to the reader, and how much the present sending has brought."""

    __slots__ = ("heard_chars", "heard_tokens", "n_chars", "n_tokens")

    def __init__(self) -> None:
        self.n_tokens = self.n_chars = 0
        self.heard_tokens = self.heard_chars = 0

    def start_anew(self) -> None:
        self.heard_tokens = self.heard_chars = 0

    def new_of(self, chunk: GenerateChunk) -> GenerateChunk:
        """The part of the chunk that the reader has not had; the chunk itself where that is all of it."""
        index = max(chunk.index, self.n_tokens)
        skip = min(index - chunk.index, len(chunk.tokens))
        self.heard_tokens = chunk.index + len(chunk.tokens)
        self.heard_chars += len(chunk.text)
        n_new_chars = min(len(chunk.text), max(0, self.heard_chars - self.n_chars))
        self.n_tokens = max(self.n_tokens, self.heard_tokens)
        self.n_chars = max(self.n_chars, self.heard_chars)
        if index == chunk.index and n_new_chars == len(chunk.text):
            return chunk
        logprobs: tuple[TokenLogprob, ...] | None = None if chunk.logprobs is None else chunk.logprobs[skip:]
        text = chunk.text[len(chunk.text) - n_new_chars :]
        return msgspec.structs.replace(chunk, index=index, tokens=chunk.tokens[skip:], text=text, logprobs=logprobs)


def _nothing() -> None:
    pass

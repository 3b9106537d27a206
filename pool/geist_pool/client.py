"""The synchronous client of a pool.

    with Client() as pool:
        pool.create_context(open("tavern.txt").read(), name="tavern")
        answer = pool.generate("\\nThe innkeeper says:", context="tavern", max_tokens=32)
        choice = pool.score("\\nThe mood is", [" tense", " merry"], context="tavern")

One client belongs to one thread at a time; threads that ask in parallel take a client each. Every failure is a `GeistPoolError`:
the pool's own errors under their classes of `geist_pool.errors`, and `NoAnswer` where nothing came in time or the pool went away.
A request that ended in `NoAnswer` may or may not have been carried out; this version does not ask again by itself.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from geist_pool import config, protocol
from geist_pool.errors import BadRequest, GeistPoolError, NoAnswer, ProtocolError, from_wire
from geist_pool.protocol import (
    Cancel,
    CancelResult,
    ContextCreate,
    ContextDrop,
    ContextDropResult,
    ContextGet,
    ContextInfo,
    ContextList,
    ContextListResult,
    ContextResult,
    Generate,
    GenerateChunk,
    GenerateResult,
    Info,
    InfoResult,
    Message,
    Reply,
    Request,
    Sampling,
    Score,
    ScoreResult,
    Stats,
    StatsResult,
    Tokenize,
    TokenizeResult,
)

Prompt = str | Sequence[int] | Sequence[Message | Mapping[str, str]]
"""Text, token ids, or chat messages (`Message`, or maps with role and content)."""

TemplateArgs = Mapping[str, bool | int | float | str | None]

CONNECT_TIMEOUT_S: Final = 5.0
SLICE_MS: Final = 200  # a signal that comes just before the poll would else wait for the whole of it
LINGER_MS: Final = 200  # how long a closing client waits for its last cancels to leave

_T = TypeVar("_T")
_reply_decoder: Final = msgspec.msgpack.Decoder(Reply)


class Client:
    """A connection to one pool.

    address: ipc or tcp address; by default GEIST_POOL_ADDRESS, else the socket of the pool named `pool` on this machine.
    space: the space of all requests; contexts of other spaces are not seen.
    timeout: seconds to wait for an answer, for a stream between two chunks; None waits for ever. Each call may give its own.
    connect_timeout: seconds to wait for a pool at the address.
    """

    def __init__(
        self,
        address: str | None = None,
        pool: str = config.DEFAULT_POOL,
        space: str = "default",
        timeout: float | None = 60.0,
        *,
        connect_timeout: float = CONNECT_TIMEOUT_S,
    ) -> None:
        if address is None:
            environment = config.read_environment()
            address = environment.settings.get("address") or config.default_address(environment, pool)
        self.address = address
        self.space = space
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.discarded = 0  # replies to requests that were given up, and frames that are no reply
        self._prefix = os.urandom(6).hex()
        self._count = 0
        self._inbox: dict[bytes, deque[Reply]] = {}  # of requests in flight
        self._lost: set[bytes] = set()  # those among them whose connection broke
        self._context: zmq.Context[zmq.Socket[bytes]] | None = zmq.Context()
        try:
            self._open()
        except BaseException:
            self._context.term()
            self._context = None
            raise

    # ---- life

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is in flight and closes the connection. Closing twice is allowed."""
        if self._context is None:
            return
        context, self._context = self._context, None
        try:
            for rid in list(self._inbox):
                self._send_cancel(rid)
            self._inbox.clear()
        finally:
            self._close_sockets()
            context.term()

    def _open(self) -> None:
        assert self._context is not None
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.linger = LINGER_MS
        self._socket.immediate = True  # nothing is queued for a pool that is not there
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as e:
            self._close_sockets()
            raise NoAnswer(f"{self.address} is no address that can be connected to: {e.strerror}") from None

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    # ---- operations

    def info(self, *, timeout: float | None = None) -> InfoResult:
        """What model and pool this is."""
        return self._call(Info(space=self.space), InfoResult, timeout)

    def stats(self, *, timeout: float | None = None) -> StatsResult:
        """Counters since the broker's start, and gauges."""
        return self._call(Stats(space=self.space), StatsResult, timeout)

    def tokenize(self, text: str, *, special: bool = False, timeout: float | None = None) -> TokenizeResult:
        """Token ids of a text on its own, without BOS. special: texts of control tokens become those tokens."""
        return self._call(self._make(Tokenize, text=text, special=special), TokenizeResult, timeout)

    def create_context(
        self,
        prompt: Prompt | None = None,
        *,
        on: str | None = None,
        name: str | None = None,
        ttl_s: int | None = None,
        pin: bool = False,
        special: bool = False,
        template_args: TemplateArgs | None = None,
        deadline_ms: int | None = None,
        timeout: float | None = None,
    ) -> ContextResult:
        """Computes a context and keeps it in the pool.

        on: id or name of a context that this one continues. ttl_s: seconds until it is dropped. pin: never evicted.
        Raises StoreFull, TooLong, UnknownContext, BadRequest, ...
        """
        request = self._make(
            ContextCreate,
            **_prompt(prompt),
            on=on,
            name=name,
            ttl_s=ttl_s,
            pin=pin,
            special=special,
            template_args=dict(template_args or {}),
            deadline_ms=deadline_ms,
        )
        return self._call(request, ContextResult, timeout)

    def contexts(self, *, timeout: float | None = None) -> tuple[ContextInfo, ...]:
        """All contexts of the space."""
        return self._call(ContextList(space=self.space), ContextListResult, timeout).contexts

    def context(self, context: str, *, timeout: float | None = None) -> ContextInfo:
        """One context by id or name. Raises UnknownContext."""
        return self._call(self._make(ContextGet, context=context), ContextResult, timeout).context

    def drop_context(self, context: str, *, timeout: float | None = None) -> str:
        """Forgets a context by id or name and returns its id; requests that hold it finish. Raises UnknownContext."""
        return self._call(self._make(ContextDrop, context=context), ContextDropResult, timeout).id

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        context: str | None = None,
        max_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        ignore_eog: bool = False,
        special: bool = False,
        template_args: TemplateArgs | None = None,
        deadline_ms: int | None = None,
        timeout: float | None = None,
    ) -> GenerateResult:
        """Continues a context (id or name) by the prompt, or a whole prompt where there is no context, and generates.

        sampling: greedy by default. stop: strings that end the answer and are no part of it. logprobs: None, or how many of the
        likeliest tokens to report beside each token's own. ignore_eog: go on past end-of-generation tokens.
        """
        options = {k: v for k, v in locals().items() if k not in ("self", "prompt", "timeout")}
        return self._call(self._generate(prompt, stream=False, **options), GenerateResult, timeout)

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        context: str | None = None,
        max_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        ignore_eog: bool = False,
        special: bool = False,
        template_args: TemplateArgs | None = None,
        deadline_ms: int | None = None,
        timeout: float | None = None,
    ) -> Stream:
        """Like `generate`, as an iterator over chunks; its `result()` is the whole answer."""
        options = {k: v for k, v in locals().items() if k not in ("self", "prompt", "timeout")}
        return self._start_stream(self._generate(prompt, stream=True, **options), timeout)

    def score(
        self,
        prompt: Prompt | None,
        labels: Sequence[str | Sequence[int]],
        *,
        context: str | None = None,
        special: bool = False,
        template_args: TemplateArgs | None = None,
        deadline_ms: int | None = None,
        timeout: float | None = None,
    ) -> ScoreResult:
        """Log-probabilities of whole labels (text or token ids) as continuations of context and prompt."""
        request = self._make(
            Score,
            **_prompt(prompt),
            labels=tuple(label if isinstance(label, str) else tuple(int(t) for t in label) for label in labels),
            context=context,
            special=special,
            template_args=dict(template_args or {}),
            deadline_ms=deadline_ms,
        )
        return self._call(request, ScoreResult, timeout)

    def cancel(self, request_id: str, *, timeout: float | None = None) -> bool:
        """Ends one of this client's requests, e.g. a `Stream.id`. False if there is none of that id in flight."""
        return self._call(self._make(Cancel, id=request_id), CancelResult, timeout).found

    def _generate(self, prompt: Prompt | None, *, stream: bool, **options: Any) -> Generate:
        options["sampling"] = options["sampling"] or Sampling()
        options["template_args"] = dict(options["template_args"] or {})
        options["stop"] = tuple(options["stop"])
        return self._make(Generate, **_prompt(prompt), stream=stream, **options)

    def _make(self, kind: type[_T], **fields: Any) -> _T:
        """The request, checked against the table of limits before it travels. Raises BadRequest with the field."""
        request = cast(Any, kind)(space=self.space, **fields)
        try:
            msgspec.convert(msgspec.to_builtins(request, builtin_types=(bytes,)), kind)
        except (msgspec.ValidationError, UnicodeEncodeError) as e:
            words, _, path = str(e).partition(" - at `$.")
            raise BadRequest(words, path=path.rstrip("`") or None) from None
        return cast(_T, request)

    # ---- sending and receiving

    def _timeout(self, timeout: float | None) -> float | None:
        return self.timeout if timeout is None else timeout

    def _call(self, request: Request, expected: type[_T], timeout: float | None) -> _T:
        rid = self._new_id()
        try:
            self._send(rid, request)
            reply = self._wait(rid, self._timeout(timeout))
        except BaseException:  # also KeyboardInterrupt: nobody will ask for this answer any more
            self._give_up(rid)
            raise
        return _unpack(reply, expected)

    def _start_stream(self, request: Request, timeout: float | None) -> Stream:
        rid = self._new_id()
        try:
            self._send(rid, request)
            return Stream(self, rid, self._timeout(timeout))
        except BaseException:
            self._give_up(rid)
            raise

    def _new_id(self) -> bytes:
        self._count += 1
        return f"{self._prefix}-{self._count}".encode()

    def _send(self, rid: bytes, request: Request) -> None:
        """Sends a request once there is a connection, and opens an inbox for its replies."""
        if self._context is None:
            raise NoAnswer("this client is closed")
        try:
            body = protocol.encode(request)
        except UnicodeEncodeError as e:
            raise BadRequest(f"the request holds text that is no Unicode: {e.reason}") from None
        if not self._socket.poll(int(self.connect_timeout * 1000), zmq.POLLOUT):
            raise NoAnswer(f"there is no pool at {self.address} (waited {self.connect_timeout:g} s)")
        self._note_disconnect()  # an old one must not be taken for this request's; and late replies go
        self._inbox[rid] = deque()
        try:
            self._socket.send_multipart((protocol.MAGIC, rid, body), flags=zmq.NOBLOCK)
        except zmq.Again:
            self._forget(rid)
            raise NoAnswer(f"the pool at {self.address} takes no more messages") from None
        except BaseException:  # interrupted between two frames: the rest must not join the next message
            self._reset()
            raise

    def _wait(self, rid: bytes, timeout: float | None) -> Reply:
        """The next reply to a request; after the final one its inbox is closed.

        Raises NoAnswer after `timeout` seconds, or at once when the connection is lost.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self._inbox[rid]:
            if rid in self._lost:
                raise NoAnswer(f"the pool at {self.address} went away before it answered")
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise NoAnswer(f"the pool at {self.address} gave no answer within {timeout:g} s")
            self._poller.poll(SLICE_MS if left is None else min(SLICE_MS, int(left * 1000) + 1))
            self._note_disconnect()
        reply = self._inbox[rid].popleft()
        if reply.final:
            self._forget(rid)
        return reply

    def _drain(self) -> None:
        """Sorts everything that has arrived into the inboxes; what belongs to none is counted and dropped."""
        while True:
            try:
                frames = self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            inbox = self._inbox.get(frames[1]) if len(frames) == 3 and frames[0] == protocol.MAGIC else None
            if inbox is None:
                self.discarded += 1
                continue
            try:
                inbox.append(_reply_decoder.decode(frames[2]))
            except msgspec.DecodeError as e:
                wrong = protocol.error_body(ProtocolError(f"the pool's answer cannot be understood: {e}"))
                inbox.append(Reply(ok=False, error=wrong))

    def _note_disconnect(self) -> None:
        """Takes in what has arrived; if the connection broke since the last look, requests in flight are lost."""
        broken = False
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            broken = True
        self._drain()
        if broken:
            self._lost.update(self._inbox)

    def _forget(self, rid: bytes) -> None:
        self._inbox.pop(rid, None)
        self._lost.discard(rid)

    def _give_up(self, rid: bytes) -> None:
        """Tells the pool that nobody waits for this request any more; its replies will be discarded."""
        if rid in self._inbox:
            if rid not in self._lost:
                self._send_cancel(rid)
            self._forget(rid)

    def _send_cancel(self, rid: bytes) -> None:
        body = protocol.encode(Cancel(space=self.space, id=rid.decode()))
        try:  # without an inbox the answer is discarded
            self._socket.send_multipart((protocol.MAGIC, self._new_id(), body), flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # no connection, so the pool knows already that this client is gone

    def _reset(self) -> None:
        """A new connection; requests in flight on the old one are lost."""
        self._lost.update(self._inbox)
        self._close_sockets()
        self._open()


class Stream:
    """Chunks of one answer as they are made: an iterator, and a context manager that cancels what is not read to the end."""

    def __init__(self, client: Client, rid: bytes, timeout: float | None) -> None:
        self._client = client
        self._rid = rid
        self._timeout = timeout
        self._result: GenerateResult | None = None
        self._error: GeistPoolError | None = None

    @property
    def id(self) -> str:
        """The request's id, for `Client.cancel`."""
        return self._rid.decode()

    def __iter__(self) -> Iterator[GenerateChunk]:
        return self

    def __next__(self) -> GenerateChunk:
        """The next chunk. Raises the request's error; StopIteration when the answer is complete."""
        if self._error is not None:
            raise self._error
        if self._result is not None:
            raise StopIteration
        try:
            reply = self._client._wait(self._rid, self._timeout)
            if reply.ok and not reply.final:
                return _unpack(reply, GenerateChunk)
            self._result = _unpack(reply, GenerateResult)
        except GeistPoolError as e:
            self._error = e
            self._client._give_up(self._rid)
            raise
        except BaseException:
            self._error = NoAnswer("this stream was interrupted")
            self._client._give_up(self._rid)
            raise
        raise StopIteration

    def result(self) -> GenerateResult:
        """The whole answer; reads the chunks that nobody has read. Raises the request's error."""
        for _ in self:
            pass
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Asks the pool to stop; `result()` is then what was generated so far, with finish_reason "cancelled"."""
        if self._result is None and self._error is None:
            self._client.cancel(self.id)

    def close(self) -> None:
        """Gives up what has not been read."""
        if self._result is None and self._error is None:
            self._error = NoAnswer("this stream is closed")
            self._client._give_up(self._rid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _prompt(prompt: Prompt | None) -> dict[str, Any]:
    """The one field of text, tokens, messages that the prompt is."""
    if prompt is None:
        return {}
    if isinstance(prompt, str):
        return {"text": prompt}
    items = list(prompt)
    if items and isinstance(items[0], Message | Mapping):
        try:
            return {"messages": tuple(msgspec.convert(m, Message, from_attributes=True) for m in items)}
        except msgspec.ValidationError as e:
            raise BadRequest(str(e), path="messages") from None
    try:
        return {"tokens": tuple(int(cast(int, t)) for t in items)}
    except (TypeError, ValueError) as e:
        raise BadRequest(f"a prompt is text, token ids or messages: {e}", path="tokens") from None


def _unpack(reply: Reply, expected: type[_T]) -> _T:
    if not reply.ok:
        if reply.error is None:
            raise ProtocolError("the pool answered with an error that says nothing")
        e = reply.error
        raise from_wire(e.code, e.message, e.path, e.retry_after, e.data)
    if not isinstance(reply.result, expected):
        raise ProtocolError(f"the pool answered with {type(reply.result).__name__} where {expected.__name__} is due")
    return reply.result

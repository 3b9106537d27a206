"""The client for one thread: blocking calls over a DEALER socket."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar, Unpack

import zmq
from zmq.utils.monitor import recv_monitor_message

from geist_pool import config
from geist_pool.client import calls, wire
from geist_pool.client.calls import Call, Calls, Prompt
from geist_pool.client.wire import Desk, Flight, Reading
from geist_pool.errors import GeistPoolError, NoAnswer
from geist_pool.protocol import (
    ContextInfo,
    ContextResult,
    GenerateChunk,
    GenerateResult,
    InfoResult,
    Reply,
    SavedInfo,
    ScoreResult,
    StatsResult,
    StoryEvent,
    TokenizeResult,
)

EVENTS: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
SLICE_S: Final = 0.2  # a signal that comes just before the poll would else wait for the whole of it

T = TypeVar("T")


def find_address(address: str | None, pool: str) -> str:
    """The address given, else GEIST_POOL_ADDRESS, else the socket of the pool of that name on this machine."""
    if address is not None:
        return address
    environment = config.read_environment()
    return environment.settings.get("address") or config.default_address(environment, pool)


class Client:
    """A connection to one pool, for one thread at a time; threads that ask in parallel take a client each.

    address: ipc or tcp address; by default GEIST_POOL_ADDRESS, else the socket of the pool named `pool` on this machine.
    space: the space of all requests; contexts of other spaces are not seen.
    timeout: seconds to wait for an answer, for a stream between two chunks; None waits for ever. Each call may give its own.
    connect_timeout: seconds to wait for a pool at the address, at first and when it went away.
    retries: how many lost connections a request outlives by being sent again. resend_after: seconds without an answer after
    which it is sent again on a connection that stands, then twice as many, and so on. retries=0 never sends anything twice.
    """

    def __init__(
        self,
        address: str | None = None,
        pool: str = config.DEFAULT_POOL,
        space: str = "default",
        timeout: float | None = 60.0,
        *,
        connect_timeout: float = wire.CONNECT_TIMEOUT_S,
        retries: int = wire.RETRIES,
        resend_after: float = wire.RESEND_AFTER_S,
    ) -> None:
        self.address = find_address(address, pool)
        self.space = space
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self._calls = Calls(space, lambda: secrets.randbits(53))
        self._desk = Desk(self.address, secrets.token_hex(6), retries, resend_after)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._open()
        except BaseException:
            self._desk.closed = True
            self._context.term()
            raise

    @property
    def discarded(self) -> int:
        """Replies to requests that were given up, and frames that are no reply."""
        return self._desk.discarded

    # ---- life

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is in flight and closes the connection. Closing twice is allowed."""
        if self._desk.closed:
            return
        try:
            for frames in self._desk.close(self.space):
                self._send_now(frames)
        finally:
            self._close_sockets()
            self._context.term()

    def _open(self) -> None:
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option, value in wire.SOCKET_OPTIONS.items():
            setattr(self._socket, option, value)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(EVENTS)
        self._up = False  # as the monitor tells it: the socket itself would take messages for a connection that has just broken
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

    def info(self, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> InfoResult:
        """What model and pool this is."""
        return self._ask(self._calls.info(**options), timeout)

    def stats(self, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> StatsResult:
        """Counters since the broker's start, and gauges."""
        return self._ask(self._calls.stats(**options), timeout)

    def story(self, id: str, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> tuple[StoryEvent, ...]:
        """What happened to a request, job, context or worker, oldest first, as far as the pool remembers it."""
        return self._ask(self._calls.story(id, **options), timeout)

    def tokenize(self, text: str, *, timeout: float | None = None, **options: Unpack[calls.TokenizeOptions]) -> TokenizeResult:
        """Token ids of a text on its own, without BOS."""
        return self._ask(self._calls.tokenize(text, **options), timeout)

    def create_context(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[calls.CreateOptions]
    ) -> ContextResult:
        """Computes a context and keeps it in the pool. Raises StoreFull, TooLong, UnknownContext, TemplateMismatch, ..."""
        return self._ask(self._calls.create_context(prompt, **options), timeout)

    def contexts(self, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> tuple[ContextInfo, ...]:
        """All contexts of the space."""
        return self._ask(self._calls.contexts(**options), timeout)

    def context(self, context: str, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> ContextInfo:
        """One context by id or name. Raises UnknownContext."""
        return self._ask(self._calls.context(context, **options), timeout)

    def drop_context(self, context: str, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> str:
        """Forgets a context by id or name and returns its id; requests that hold it finish. Raises UnknownContext."""
        return self._ask(self._calls.drop_context(context, **options), timeout)

    def save_context(self, context: str, *, timeout: float | None = None, **options: Unpack[calls.SaveOptions]) -> SavedInfo:
        """Writes a context to the pool's own directory. Raises UnknownContext."""
        return self._ask(self._calls.save_context(context, **options), timeout)

    def load_context(self, saved: str, *, timeout: float | None = None, **options: Unpack[calls.LoadOptions]) -> ContextResult:
        """Brings a saved context back. Raises UnknownContext, ImageDamaged, ImageMismatch, StoreFull."""
        return self._ask(self._calls.load_context(saved, **options), timeout)

    def saved_contexts(self, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> tuple[SavedInfo, ...]:
        """What the space has saved."""
        return self._ask(self._calls.saved_contexts(**options), timeout)

    def generate(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[calls.GenerateOptions]
    ) -> GenerateResult:
        """Continues a context (id or name) by the prompt, or a whole prompt where there is no context, and generates."""
        return self._ask(self._calls.generate(prompt, stream=False, **options), timeout)

    def stream(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[calls.GenerateOptions]
    ) -> Stream:
        """Like `generate`, as an iterator over chunks; its `result()` is the whole answer."""
        return Stream(self, self._calls.generate(prompt, stream=True, **options), self._timeout(timeout))

    def score(
        self,
        prompt: Prompt | None,
        labels: Sequence[str | Sequence[int]],
        *,
        timeout: float | None = None,
        **options: Unpack[calls.ScoreOptions],
    ) -> ScoreResult:
        """Log-probabilities of whole labels (text or token ids) as continuations of context and prompt."""
        return self._ask(self._calls.score(prompt, labels, **options), timeout)

    def cancel(self, request_id: str, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> bool:
        """Ends one of this client's requests, e.g. a `Stream.id`. False if there is none of that id in flight."""
        return self._ask(self._calls.cancel(request_id, **options), timeout)

    # ---- sending and receiving

    def _timeout(self, timeout: float | None) -> float | None:
        return self.timeout if timeout is None else timeout

    def _ask(self, call: Call[T], timeout: float | None) -> T:
        flight = self._desk.open(call.request)
        try:
            self._send(flight, self.connect_timeout)
            return call.unpack(self._wait(flight, self._timeout(timeout)))
        finally:  # also after KeyboardInterrupt: nobody will ask for this answer any more
            self._give_up(flight)

    def _send(self, flight: Flight, patience: float) -> None:
        """Sends a request once there is a connection, `patience` seconds from now at the latest."""
        until = time.monotonic() + patience
        while True:
            if not self._poll_connection(until):
                raise self._desk.no_pool(flight, patience)
            try:
                self._socket.send_multipart(flight.frames, flags=zmq.NOBLOCK)
            except zmq.Again:
                if time.monotonic() >= until:  # else the connection broke a moment ago, and may come back
                    raise self._desk.takes_no_more() from None
            except BaseException:  # interrupted between two frames: the rest must not join the next message
                self._reset()
                raise
            else:
                flight.mark_sent()
                return

    def _poll_connection(self, until: float) -> bool:
        """Waits until there is a connection that can be written to; then everything that came before has been taken in."""
        while True:
            left = until - time.monotonic()
            self._take_in()  # a disconnection of before must not be taken for that of the next request
            if self._up and self._socket.poll(0, zmq.POLLOUT):
                return True
            if left <= 0:
                return False
            slice_ms = int(1000 * min(SLICE_S, left)) + 1
            if self._up:
                self._socket.poll(slice_ms, zmq.POLLOUT)
            else:
                self._monitor.poll(slice_ms)

    def _wait(self, flight: Flight, timeout: float | None) -> Reply:
        """The next reply to a request. Raises NoAnswer."""
        wait = self._desk.wait(flight, timeout, time.monotonic())
        while True:
            step = self._desk.step(wait, time.monotonic())
            if isinstance(step, Reply):
                return step
            if isinstance(step, wire.SendAgain):
                self._send(flight, wait.at_most(self.connect_timeout, time.monotonic()))
            else:
                self._poller.poll(int(1000 * (SLICE_S if step is None else min(SLICE_S, step))) + 1)
                self._take_in()

    def _take_in(self) -> None:
        """Takes in what has arrived; if the connection broke since the last look, requests in flight are lost."""
        broken = False
        while self._monitor.poll(0):
            self._up = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            broken |= not self._up
        while True:
            try:
                self._desk.take(self._socket.recv_multipart(flags=zmq.NOBLOCK))
            except zmq.Again:
                break
        if broken:
            self._desk.connection_lost()

    def _give_up(self, flight: Flight) -> None:
        """Tells the pool that nobody waits for this request any more, if it is still at work; its replies will be discarded."""
        frames = self._desk.end(flight, self.space)
        if frames is not None:
            self._send_now(frames)

    def _send_now(self, frames: wire.Frames) -> None:
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # no connection, so the pool knows already that this client is gone

    def _reset(self) -> None:
        """A new connection; requests in flight on the old one are lost."""
        self._desk.connection_lost()
        self._close_sockets()
        self._open()


class Stream:
    """Chunks of one answer as they are made: an iterator, and a context manager that cancels what is not read to the end."""

    def __init__(self, client: Client, call: Call[GenerateResult], timeout: float | None) -> None:
        self._client = client
        self._timeout = timeout
        self._reading = Reading(call)
        self._flight = client._desk.open(call.request)
        try:
            client._send(self._flight, client.connect_timeout)
        except BaseException:
            client._give_up(self._flight)
            raise

    @property
    def id(self) -> str:
        """The request's id, for `Client.cancel` and `Client.story`."""
        return self._flight.rid.decode()

    def __iter__(self) -> Iterator[GenerateChunk]:
        return self

    def __next__(self) -> GenerateChunk:
        """The next chunk. Raises the request's error; StopIteration when the answer is complete."""
        reading = self._reading
        while not reading.ready:
            if reading.error is not None:
                raise reading.error
            if reading.result is not None:
                raise StopIteration
            try:
                reading.take(self._client._wait(self._flight, self._timeout))
            except BaseException as e:
                self._end(e if isinstance(e, GeistPoolError) else NoAnswer("this stream was interrupted"))
                raise
        return reading.ready.popleft()

    def result(self) -> GenerateResult:
        """The whole answer; reads the chunks that nobody has read. Raises the request's error."""
        for _ in self:
            pass
        assert self._reading.result is not None
        return self._reading.result

    def cancel(self) -> None:
        """Asks the pool to stop; `result()` is then what was generated so far, with finish_reason "cancelled"."""
        if not self._reading.over:
            self._client.cancel(self.id)

    def close(self) -> None:
        """Gives up what has not been read."""
        if not self._reading.over:
            self._end(NoAnswer("this stream is closed"))

    def _end(self, error: GeistPoolError) -> None:
        self._reading.error = error
        self._client._give_up(self._flight)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

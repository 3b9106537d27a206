"""The client for an event loop: many requests in flight over one DEALER socket."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from geist_pool import config
from geist_pool.client import calls, wire
from geist_pool.client.calls import Call, Calls, Prompt
from geist_pool.client.sync import EVENTS, find_address
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

T = TypeVar("T")


class AsyncClient:
    """A connection to one pool, for the event loop that first uses it; any number of its tasks may ask at a time.

    Arguments as for `Client`. A task that is cancelled while it waits has its request cancelled at the pool.
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def discarded(self) -> int:
        """Replies to requests that were given up, and frames that are no reply."""
        return self._desk.discarded

    # ---- life

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what is in flight, which ends with NoAnswer, and closes the connection. Closing twice is allowed."""
        if self._desk.closed:
            return
        for frames in self._desk.close(self.space):
            self._send_now(frames)
        if self._reader is None:
            return
        self._reader.cancel()
        await asyncio.wait((self._reader,))
        self._close_sockets()
        await asyncio.to_thread(self._context.term)  # lingers until the cancels have left

    def _open(self) -> None:
        """Connects, once."""
        loop = asyncio.get_running_loop()
        if self._loop is not None:
            if self._loop is not loop:
                raise RuntimeError("an AsyncClient belongs to the event loop that first used it")
            return
        if self._desk.closed:
            raise NoAnswer("this client is closed")
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        for option, value in wire.SOCKET_OPTIONS.items():
            setattr(socket, option, value)
        monitor = cast(zmq.asyncio.Socket, cast(Any, socket).get_monitor_socket(EVENTS))
        self._context, self._socket, self._monitor = context, socket, monitor
        self._now: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)  # aliases it, for what never waits
        self._monitor_now: zmq.Socket[bytes] = zmq.Socket.shadow(monitor.underlying)
        try:
            socket.connect(self.address)
        except zmq.ZMQError as e:
            self._close_sockets()
            context.term()
            raise NoAnswer(f"{self.address} is no address that can be connected to: {e.strerror}") from None
        self._up = asyncio.Event()  # as the monitor tells it: the socket itself would take messages for a connection just broken
        self._loop = loop
        self._reader = loop.create_task(self._read(), name=f"replies of {self.address}")

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    # ---- operations

    async def info(self, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> InfoResult:
        """What model and pool this is."""
        return await self._ask(self._calls.info(**options), timeout)

    async def stats(self, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> StatsResult:
        """Counters since the broker's start, and gauges."""
        return await self._ask(self._calls.stats(**options), timeout)

    async def story(self, id: str, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> tuple[StoryEvent, ...]:
        """What happened to a request, job, context or worker, oldest first, as far as the pool remembers it."""
        return await self._ask(self._calls.story(id, **options), timeout)

    async def tokenize(
        self, text: str, *, timeout: float | None = None, **options: Unpack[calls.TokenizeOptions]
    ) -> TokenizeResult:
        """Token ids of a text on its own, without BOS."""
        return await self._ask(self._calls.tokenize(text, **options), timeout)

    async def create_context(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[calls.CreateOptions]
    ) -> ContextResult:
        """Computes a context and keeps it in the pool. Raises StoreFull, TooLong, UnknownContext, TemplateMismatch, ..."""
        return await self._ask(self._calls.create_context(prompt, **options), timeout)

    async def contexts(self, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> tuple[ContextInfo, ...]:
        """All contexts of the space."""
        return await self._ask(self._calls.contexts(**options), timeout)

    async def context(self, context: str, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> ContextInfo:
        """One context by id or name. Raises UnknownContext."""
        return await self._ask(self._calls.context(context, **options), timeout)

    async def drop_context(self, context: str, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> str:
        """Forgets a context by id or name and returns its id; requests that hold it finish. Raises UnknownContext."""
        return await self._ask(self._calls.drop_context(context, **options), timeout)

    async def save_context(
        self, context: str, *, timeout: float | None = None, **options: Unpack[calls.SaveOptions]
    ) -> SavedInfo:
        """Writes a context to the pool's own directory. Raises UnknownContext."""
        return await self._ask(self._calls.save_context(context, **options), timeout)

    async def load_context(
        self, saved: str, *, timeout: float | None = None, **options: Unpack[calls.LoadOptions]
    ) -> ContextResult:
        """Brings a saved context back. Raises UnknownContext, ImageDamaged, ImageMismatch, StoreFull."""
        return await self._ask(self._calls.load_context(saved, **options), timeout)

    async def saved_contexts(self, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> tuple[SavedInfo, ...]:
        """What the space has saved."""
        return await self._ask(self._calls.saved_contexts(**options), timeout)

    async def generate(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[calls.GenerateOptions]
    ) -> GenerateResult:
        """Continues a context (id or name) by the prompt, or a whole prompt where there is no context, and generates."""
        return await self._ask(self._calls.generate(prompt, stream=False, **options), timeout)

    def stream(
        self, prompt: Prompt | None = None, *, timeout: float | None = None, **options: Unpack[calls.GenerateOptions]
    ) -> AsyncStream:
        """Like `generate`, as an async iterator over chunks; its `result()` is the whole answer.

        Nothing is sent before the first of `async with`, `async for`, `start()` and `result()`."""
        return AsyncStream(self, self._calls.generate(prompt, stream=True, **options), self._timeout(timeout))

    async def score(
        self,
        prompt: Prompt | None,
        labels: Sequence[str | Sequence[int]],
        *,
        timeout: float | None = None,
        **options: Unpack[calls.ScoreOptions],
    ) -> ScoreResult:
        """Log-probabilities of whole labels (text or token ids) as continuations of context and prompt."""
        return await self._ask(self._calls.score(prompt, labels, **options), timeout)

    async def cancel(self, request_id: str, *, timeout: float | None = None, **options: Unpack[calls.Options]) -> bool:
        """Ends one of this client's requests, e.g. an `AsyncStream.id`. False if there is none of that id in flight."""
        return await self._ask(self._calls.cancel(request_id, **options), timeout)

    # ---- sending and receiving

    def _timeout(self, timeout: float | None) -> float | None:
        return self.timeout if timeout is None else timeout

    async def _ask(self, call: Call[T], timeout: float | None) -> T:
        self._open()
        flight = self._desk.open(call.request)
        try:
            await self._send(flight, self.connect_timeout)
            return call.unpack(await self._wait(flight, self._timeout(timeout)))
        finally:  # also when this task is cancelled: nobody will ask for this answer any more
            self._give_up(flight)

    async def _send(self, flight: Flight, patience: float) -> None:
        """Sends a request once there is a connection, `patience` seconds from now at the latest."""
        until = time.monotonic() + patience
        while True:
            left = max(0.0, until - time.monotonic())
            if not await self._connection(left):
                raise self._desk.no_pool(flight, patience)
            if self._desk.closed:
                raise NoAnswer("this client is closed")
            self._take_in()  # a disconnection of before must not be taken for this request's
            if self._up.is_set() and self._send_now(flight.frames):
                flight.mark_sent()
                return
            if not left:  # else the connection broke a moment ago, and may come back
                raise self._desk.takes_no_more()

    async def _connection(self, patience: float) -> bool:
        """Waits until there is a connection that can be written to; False after so many seconds."""
        try:
            async with asyncio.timeout(patience):
                await self._up.wait()
                if not cast(int, self._socket.get(zmq.EVENTS)) & zmq.POLLOUT:
                    await cast(Any, self._socket).poll(None, zmq.POLLOUT)
        except TimeoutError:
            return False
        return True

    async def _wait(self, flight: Flight, timeout: float | None) -> Reply:
        """The next reply to a request. Raises NoAnswer."""
        bell = asyncio.Event()
        flight.on_change = bell.set
        wait = self._desk.wait(flight, timeout, time.monotonic())
        while True:
            bell.clear()
            step = self._desk.step(wait, time.monotonic())
            if isinstance(step, Reply):
                return step
            if isinstance(step, wire.SendAgain):
                await self._send(flight, wait.at_most(self.connect_timeout, time.monotonic()))
                continue
            try:
                async with asyncio.timeout(step):
                    await bell.wait()
            except TimeoutError:
                continue

    async def _read(self) -> None:
        """Takes in replies and disconnections as they come, until it is cancelled."""
        poller = zmq.asyncio.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            await poller.poll()
            self._take_in()

    def _take_in(self) -> None:
        """Takes in what has arrived; if the connection broke since the last look, requests in flight are lost."""
        broken = False
        while self._monitor_now.poll(0):
            if recv_monitor_message(self._monitor_now)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._up.set()
            else:
                self._up.clear()
                broken = True
        while True:
            try:
                self._desk.take(self._now.recv_multipart(flags=zmq.NOBLOCK))
            except zmq.Again:
                break
        self._look_again()
        if broken:
            self._desk.connection_lost()

    def _give_up(self, flight: Flight) -> None:
        """Tells the pool that nobody waits for this request any more, if it is still at work; its replies will be discarded."""
        frames = self._desk.end(flight, self.space)
        if frames is not None:
            self._send_now(frames)

    def _send_now(self, frames: wire.Frames) -> bool:
        """False where the connection is gone or takes no more."""
        try:
            self._now.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        self._look_again()
        return True

    def _look_again(self) -> None:
        """Wakes those that wait for what the socket can do now: its descriptor tells once, and a send or receive of ours may have
        taken that word."""
        self._socket.get(zmq.EVENTS)


class AsyncStream:
    """Chunks of one answer as they are made: an async iterator, and an async context manager that cancels what is not read to
    the end. Belongs to one task."""

    def __init__(self, client: AsyncClient, call: Call[GenerateResult], timeout: float | None) -> None:
        self._client = client
        self._timeout = timeout
        self._reading = Reading(call)
        self._call = call
        self._flight: Flight | None = None

    @property
    def id(self) -> str:
        """The request's id, for `AsyncClient.cancel` and `AsyncClient.story`; NoAnswer before it was sent."""
        if self._flight is None:
            raise NoAnswer("this stream has not been started")
        return self._flight.rid.decode()

    async def start(self) -> Self:
        """Sends the request, once."""
        await self._started()
        return self

    async def _started(self) -> Flight:
        if self._flight is None:
            if self._reading.error is not None:
                raise self._reading.error
            self._client._open()
            self._flight = self._client._desk.open(self._call.request)
            try:
                await self._client._send(self._flight, self._client.connect_timeout)
            except BaseException as e:
                self._end(e if isinstance(e, GeistPoolError) else NoAnswer("this stream was interrupted"))
                raise
        return self._flight

    def __aiter__(self) -> AsyncIterator[GenerateChunk]:
        return self

    async def __anext__(self) -> GenerateChunk:
        """The next chunk. Raises the request's error; StopAsyncIteration when the answer is complete."""
        reading = self._reading
        while not reading.ready:
            if reading.error is not None:
                raise reading.error
            if reading.result is not None:
                raise StopAsyncIteration
            flight = await self._started()
            try:
                reading.take(await self._client._wait(flight, self._timeout))
            except BaseException as e:
                self._end(e if isinstance(e, GeistPoolError) else NoAnswer("this stream was interrupted"))
                raise
        return reading.ready.popleft()

    async def result(self) -> GenerateResult:
        """The whole answer; reads the chunks that nobody has read. Raises the request's error."""
        async for _ in self:
            pass
        assert self._reading.result is not None
        return self._reading.result

    async def cancel(self) -> None:
        """Asks the pool to stop; `result()` is then what was generated so far, with finish_reason "cancelled"."""
        if not self._reading.over:
            await self._client.cancel(self.id)

    async def close(self) -> None:
        """Gives up what has not been read."""
        if not self._reading.over:
            self._end(NoAnswer("this stream is closed"))

    def _end(self, error: GeistPoolError) -> None:
        self._reading.error = error
        if self._flight is not None:
            self._client._give_up(self._flight)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

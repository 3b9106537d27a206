"""Sockets, descriptors and the clock in, the machine's actions out. The broker's only user of ZeroMQ."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from geist_pool import observe
from geist_pool.addresses import refuse_taken
from geist_pool.broker import wire
from geist_pool.broker.events import (
    Action,
    Adopted,
    AdoptStore,
    ClientGone,
    Dropped,
    Event,
    KeepBindings,
    KillWorker,
    ListSaved,
    Log,
    MakeDirectory,
    Peeked,
    PeekSaved,
    SavedListed,
    SendReply,
    SendWorker,
    StartText,
    Stop,
    TextReady,
    Tick,
    Unlink,
    WorkerLost,
    WorkerSaid,
)
from geist_pool.broker.machine import Machine
from geist_pool.broker.outbox import Outbox, Outcome
from geist_pool.broker.peers import Peers
from geist_pool.broker.ports import StorePort, TextPort, Wake
from geist_pool.broker.processes import Link, kill, open_process
from geist_pool.errors import ConfigError
from geist_pool.protocol import LIMITS, Hello, encode, from_worker_decoder

TICK_S: Final = 0.25  # the longest time between two looks at deadlines and heartbeats
RETRY_S: Final = 0.005  # between two tries at what a slow reader has not taken
BATCH: Final = 64  # messages of one socket before the others get their turn
FLUSH_S: Final = 0.3  # at the end, for the last replies
LINGER_MS: Final = 100
KEPT_MESSAGES: Final = 4096  # for one slow reader
KEPT_BYTES: Final = 32 << 20


EVENTS: Final = int(zmq.EVENTS)
READABLE: Final = int(zmq.POLLIN)
NOBLOCK: Final = int(zmq.NOBLOCK)  # adding up flags of an enum costs more than sending
NOBLOCK_MORE: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)


class Loop:
    """Owns both sockets and everything in the poller. Use as a context manager."""

    def __init__(
        self,
        machine: Machine,
        text: TextPort,
        store: StorePort,
        *,
        address: str,
        worker_address: str,
        parent_fd: int = -1,
        keep_contexts: bool = False,
        kept_messages: int = KEPT_MESSAGES,
        kept_bytes: int = KEPT_BYTES,
        send_hwm: int = 1000,
    ) -> None:
        """Binds. Raises ConfigError for an address that cannot be bound. kept_*, send_hwm: what is kept for one slow reader."""
        self._machine = machine
        self._text = text
        self._store = store
        self._parent_fd = parent_fd
        self._keep_contexts = keep_contexts
        self._log = observe.logger("broker")
        self._begun = time.time() - time.monotonic()
        self._stop = threading.Event()
        self._events: deque[Event] = deque()
        self._found: queue.SimpleQueue[Adopted | Peeked | SavedListed] = queue.SimpleQueue()  # by other threads
        self._links: dict[str, Link] = {}  # by worker
        self._names: dict[bytes, str] = {}  # worker by identity
        self._peers = Peers()
        self._slow: set[bytes] = set()  # clients over their limit of which the machine has not heard yet
        self._orphaned = False  # the supervisor is gone
        self._next_tick = 0.0
        self.dropped_messages = 0  # of clients and workers, that nothing could be done with
        self._stack = ExitStack()
        try:
            self._open(address, worker_address, send_hwm)
        except BaseException:
            self._stack.close()
            raise
        self._to_clients = Outbox(partial(_try_send, self._clients), messages_max=kept_messages, bytes_max=kept_bytes)
        # Workers are ours and read between two passes; what they are told is never dropped.
        self._to_workers = Outbox(partial(_try_send, self._workers), messages_max=1 << 62, bytes_max=1 << 62)

    def _open(self, address: str, worker_address: str, send_hwm: int) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = self._stack.enter_context(zmq.Context())
        self._clients = self._stack.enter_context(context.socket(zmq.ROUTER))
        self._workers = self._stack.enter_context(context.socket(zmq.ROUTER))
        for socket in (self._clients, self._workers):
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._clients.setsockopt(zmq.MAXMSGSIZE, 2 * LIMITS.body_bytes)
        self._clients.setsockopt(zmq.SNDHWM, send_hwm)
        # A client that comes back under an identity of its choice takes the place of its old connection, which may not be known
        # to have ended; libzmq would ignore the new one otherwise, without a word.
        self._clients.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._workers.setsockopt(zmq.RCVHWM, 0)
        self._monitor = self._clients.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._stack.callback(self._monitor.close, linger=0)
        self._stack.callback(self._clients.disable_monitor)
        for socket, where in ((self._clients, address), (self._workers, worker_address)):
            refuse_taken(where)
            try:
                socket.bind(where)
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot listen at {where}: {error.strerror}", path="address") from None
            if where.startswith("ipc://"):
                Path(where.removeprefix("ipc://")).chmod(0o600)
        self._wake = Wake()
        self._stack.callback(self._wake.close)
        self._files = self._stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="files"))
        self._stack.callback(self._close_links)
        self._poller = zmq.Poller()
        for readable in (self._clients, self._workers, self._monitor, self._wake.fileno(), self._text.fileno()):
            self._poller.register(readable, zmq.POLLIN)
        if self._parent_fd >= 0:
            self._poller.register(self._parent_fd, zmq.POLLIN)

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def stop(self) -> None:
        """Ends `run` soon. From any thread or signal handler."""
        self._stop.set()
        self._wake.set()

    def run(self) -> None:
        """Until `stop`, or the parent's end; then the last replies go out."""
        while not self._stop.is_set():
            due = self._due()
            ready = dict(self._poller.poll(max(0, int((due - self._now()) * 1000) + 1)))
            dead = [link for link in self._links.values() if link.pidfd in ready]  # before descriptors are closed and reused
            if self._monitor in ready:
                self._read_monitor()
            if self._workers in ready:
                self._read_workers()
            if self._clients in ready:
                self._read_clients()
            if self._text.fileno() in ready:
                for done in self._text.poll():
                    self._handle(TextReady(done))
            if self._wake.fileno() in ready:
                self._read_wake()
            for link in dead:
                self._read_workers(everything=True)  # its last words come before its death
                self._lose(link, "process ended")
            if self._parent_fd in ready and not os.read(self._parent_fd, 64):
                self._log.warning("parent gone")
                self._orphaned = True
                self._stop.set()
            if self._now() >= due:
                self._next_tick = self._now() + TICK_S
                self._handle(Tick())
            self._flush()
        self._finish()

    def _finish(self) -> None:
        self._handle(Stop())
        until = time.monotonic() + FLUSH_S
        while (self._to_clients or self._to_workers) and time.monotonic() < until:
            time.sleep(RETRY_S)
            self._flush()
        if self._orphaned:  # nobody else is left to end a worker that does not end by itself; it would hold the pool's name
            for link in self._links.values():
                kill(link)
        if not self._keep_contexts:
            self._store.unlink_all()  # also what was there before any worker came, and could not be adopted

    # ---- time

    def _now(self) -> float:
        return self._begun + time.monotonic()

    def _due(self) -> float:
        """When something is to be done even if nothing comes."""
        deadline = self._machine.wake_at()
        due = self._next_tick if deadline is None else min(self._next_tick, deadline)
        return min(due, self._now() + RETRY_S) if self._to_clients or self._to_workers else due

    # ---- events in, actions out

    def _handle(self, event: Event) -> None:
        self._events.append(event)
        while self._events:
            event = self._events.popleft()
            if isinstance(event, ClientGone):
                self._slow.discard(event.peer)
            for action in self._machine.handle(event, self._now()):
                self._perform(action)

    def _perform(self, action: Action) -> None:
        if isinstance(action, SendReply):
            self._reply(action)
        elif isinstance(action, SendWorker):
            link = self._links.get(action.worker)
            if link is not None and self._to_workers.send((link.identity, encode(action.message))) == "gone":
                self._log.warning("worker disconnected", worker=link.name)  # its process's end will follow
                kill(link)
        elif isinstance(action, StartText):
            done = self._text.at_once(action.job)
            if done is None:
                self._text.submit(action.job)
            else:
                self._events.append(TextReady(done))
        elif isinstance(action, Unlink):
            for name in action.names:
                self._store.unlink(name)
        elif isinstance(action, KillWorker):
            link = self._links.get(action.worker)
            if link is not None:
                self._log.warning("killing worker", worker=link.name, pid=link.pid, why=action.why)
                kill(link)
        elif isinstance(action, AdoptStore):
            threading.Thread(target=self._adopt, args=(action,), name="adopt", daemon=True).start()
        elif isinstance(action, PeekSaved | ListSaved):
            self._files.submit(self._look_at_files, action)
        elif isinstance(action, KeepBindings):
            self._files.submit(self._keep_bindings, action)
        elif isinstance(action, MakeDirectory):
            self._make_directory(action.path)
        else:
            assert isinstance(action, Log)
            self._log.info(action.event.replace("_", " "), **action.fields)

    def _adopt(self, order: AdoptStore) -> None:
        """In a thread of its own: sums over gigabytes must not keep health unanswered."""
        try:
            found = self._store.adopt(order)
        except Exception as error:
            self._log.error("shared memory cannot be looked through", error=f"{type(error).__name__}: {error}")
            found = Adopted((), ())
        self._found.put(found)
        self._wake.set()

    def _look_at_files(self, order: PeekSaved | ListSaved) -> None:
        """In a thread: a disk may keep one waiting."""
        self._found.put(self._store.peek(order) if isinstance(order, PeekSaved) else self._store.list_saved(order))
        self._wake.set()

    def _keep_bindings(self, order: KeepBindings) -> None:
        """In the same thread, so that a later one comes later."""
        try:
            self._store.keep_bindings(order)
        except OSError as error:
            self._log.error("names of contexts cannot be kept for a restart", error=error.strerror)

    def _make_directory(self, path: str) -> None:
        try:
            Path(path).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:  # the worker that is to write there reports it to the client
            self._log.error("directory cannot be made", error=error.strerror)

    def _read_wake(self) -> None:
        self._wake.clear()
        while not self._found.empty():
            self._handle(self._found.get())

    def _drop_message(self) -> None:
        self.dropped_messages += 1
        self._handle(Dropped())

    # ---- clients

    def _read_clients(self) -> None:
        for _ in range(BATCH):
            frames = _receive(self._clients)
            if frames is None:
                return
            peer = frames[0].bytes
            self._read_monitor()
            fd = int(frames[-1].get(zmq.SRCFD))
            if not self._peers.met(peer, fd):
                self._forget_peer(peer)
                self._peers.met(peer, fd)
            message = wire.read_message([f.bytes for f in frames])
            if isinstance(message, wire.Hopeless):
                self._drop_message()
                self._log.warning("message dropped", why=message.why, dropped=self.dropped_messages)
                continue
            self._handle(message)
            if self._peers.is_gone(peer):
                self._forget_peer(peer)

    def _read_monitor(self) -> None:
        while int(self._monitor.getsockopt(EVENTS)) & READABLE:  # a poll costs twice as much, and this is done for each message
            said = recv_monitor_message(self._monitor)
            fd = int(said["value"])
            if said["event"] == zmq.EVENT_ACCEPTED:
                self._peers.accepted(fd)
            elif said["event"] == zmq.EVENT_DISCONNECTED:
                for peer in self._peers.disconnected(fd):
                    self._forget_peer(peer)

    def _forget_peer(self, peer: bytes) -> None:
        self._peers.forget(peer)
        self._handle_later(ClientGone(peer, "disconnected", self._to_clients.drop(peer)))

    def _reply(self, action: SendReply) -> None:
        peer, frames = action.route[0], wire.reply_frames(action)
        last_word = partial(wire.unread_frames, action) if action.reply.final else None
        outcome = "over" if peer in self._slow else self._to_clients.send(frames, last_word)
        if outcome == "gone":
            self._events.append(ClientGone(peer, "disconnected", 1 + self._to_clients.drop(peer)))
        elif outcome == "over":
            self._slow.add(peer)  # until its requests have ended nothing else is kept: a stream must not have a gap
            self._events.append(ClientGone(peer, "slow", self._to_clients.shed(frames, last_word)))

    def _handle_later(self, event: Event) -> None:
        """Now, or behind the event that is being handled."""
        if self._events:
            self._events.append(event)
        else:
            self._handle(event)

    def _flush(self) -> None:
        for peer in self._to_clients.flush():
            self._forget_peer(peer)
        for identity in self._to_workers.flush():
            self._to_workers.drop(identity)
            link = self._links.get(self._names.get(identity, ""))
            if link is not None:
                kill(link)

    # ---- workers

    def _read_workers(self, *, everything: bool = False) -> None:
        left = BATCH
        while left or everything:
            frames = _receive(self._workers)
            if frames is None:
                return
            left -= 1 if left else 0
            identity, payload = frames[0].bytes, frames[-1].bytes
            name = self._names.get(identity)
            try:
                message = from_worker_decoder.decode(payload)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                self._drop_message()
                self._log.error("worker said nonsense", worker=name, error=str(error))
                if name is not None:
                    kill(self._links[name])
                continue
            if isinstance(message, Hello):
                if not self._greet(identity, message):
                    continue
                name = message.worker
            if name is None:
                self._drop_message()
                continue
            self._handle(WorkerSaid(name, message))

    def _greet(self, identity: bytes, hello: Hello) -> bool:
        """Watches a new worker's process. False for one that cannot be watched, or is nobody's of this user."""
        pidfd = open_process(hello.pid)
        if pidfd is None:
            self._drop_message()
            self._log.error("worker refused", worker=hello.worker, pid=hello.pid, why="no process of this user")
            return False
        old = self._links.get(hello.worker)
        if old is not None:
            kill(old)
            self._lose(old, "replaced")
        before = self._names.get(identity)
        if before is not None:
            self._lose(self._links[before], "said hello again")
        self._links[hello.worker] = Link(hello.worker, identity, hello.pid, pidfd)
        self._names[identity] = hello.worker
        self._poller.register(pidfd, zmq.POLLIN)
        return True

    def _lose(self, link: Link, why: str) -> None:
        if self._links.get(link.name) is not link:
            return
        del self._links[link.name]
        del self._names[link.identity]
        self._poller.unregister(link.pidfd)
        os.close(link.pidfd)
        self._to_workers.drop(link.identity)
        self._handle(WorkerLost(link.name, why))

    def _close_links(self) -> None:
        for link in self._links.values():
            os.close(link.pidfd)
        self._links.clear()


def _receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    """All frames of the next message up to FRAMES_MAX + 1, or None if there is none; what is beyond is read and thrown away."""
    frames: list[zmq.Frame] = []
    while True:
        try:
            frame = socket.recv(NOBLOCK, copy=False)
        except zmq.Again:
            return None
        if len(frames) <= wire.FRAMES_MAX:
            frames.append(frame)
        if not frame.more:
            return frames


def _try_send(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> Outcome:
    try:
        for frame in frames[:-1]:
            socket.send(frame, NOBLOCK_MORE)  # whoever takes the first frame takes them all
        socket.send(frames[-1], NOBLOCK)
    except zmq.Again:
        return "full"
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return "gone"
    return "sent"

"""The broker's process: sockets, descriptors and the clock in, the machine's actions out. The broker's only user of ZeroMQ.

`python -m geist_pool.broker.loop JSON` runs it; the JSON is a BrokerConfig. It ends at SIGTERM, or when the process that holds
the other end of `parent_fd` is gone: then every request gets its last reply and shared memory is emptied.
"""

from __future__ import annotations

import importlib.metadata
import os
import queue
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from geist_pool import config as settings
from geist_pool import observe
from geist_pool.broker import wire
from geist_pool.broker.events import (
    Action,
    Adopted,
    AdoptStore,
    ClientGone,
    Event,
    KillWorker,
    Log,
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
from geist_pool.broker.machine import Machine, MachineConfig
from geist_pool.broker.outbox import Outbox, Outcome
from geist_pool.broker.ports import Store, StorePort, TextPort, Wake
from geist_pool.broker.processes import Link, kill, open_process
from geist_pool.broker.text_jobs import TextJobs
from geist_pool.config import BrokerConfig
from geist_pool.engine import Engine, Gguf
from geist_pool.errors import ConfigError, GeistPoolError
from geist_pool.protocol import LIMITS, Hello, encode, from_worker_decoder
from geist_pool.text.tokenizer import Tokenizer
from geist_pool.text.vocabulary import Vocabulary

TICK_S: Final = 0.25  # the longest time between two looks at deadlines and heartbeats
RETRY_S: Final = 0.005  # between two tries at what a slow reader has not taken
BATCH: Final = 64  # messages of one socket before the others get their turn
FLUSH_S: Final = 0.3  # at the end, for the last replies
LINGER_MS: Final = 100
KEPT_MESSAGES: Final = 4096  # for one slow reader
KEPT_BYTES: Final = 32 << 20


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
        self._adopted: queue.SimpleQueue[Adopted] = queue.SimpleQueue()
        self._links: dict[str, Link] = {}  # by worker
        self._names: dict[bytes, str] = {}  # worker by identity
        self._fds: dict[bytes, int] = {}  # descriptor of each client's connection
        self._peers: dict[int, set[bytes]] = {}  # and back
        self._open_fds: set[int] = set()
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
        self._workers.setsockopt(zmq.RCVHWM, 0)
        self._monitor = self._clients.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._stack.callback(self._monitor.close, linger=0)
        self._stack.callback(self._clients.disable_monitor)
        for socket, where in ((self._clients, address), (self._workers, worker_address)):
            try:
                socket.bind(where)
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot listen at {where}: {error.strerror}", path="address") from None
            if where.startswith("ipc://"):
                Path(where.removeprefix("ipc://")).chmod(0o600)
        self._wake = Wake()
        self._stack.callback(self._wake.close)
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
            for action in self._machine.handle(self._events.popleft(), self._now()):
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
            self._text.submit(action.job)
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
        self._adopted.put(found)
        self._wake.set()

    def _read_wake(self) -> None:
        self._wake.clear()
        while not self._adopted.empty():
            self._handle(self._adopted.get())

    # ---- clients

    def _read_clients(self) -> None:
        for _ in range(BATCH):
            frames = _receive(self._clients)
            if frames is None:
                return
            peer = frames[0].bytes
            if peer not in self._fds:
                self._meet(peer, frames[-1])
            message = wire.read_message([f.bytes for f in frames])
            if isinstance(message, wire.Hopeless):
                self.dropped_messages += 1
                self._log.warning("message dropped", why=message.why, dropped=self.dropped_messages)
                continue
            self._handle(message)
            if peer in self._fds and self._fds[peer] not in self._open_fds:
                self._forget_peer(peer)  # it had gone before its message was read

    def _meet(self, peer: bytes, frame: zmq.Frame) -> None:
        """Notes the connection that a new client came by.

        The monitor is read up first: what it says of this descriptor after that is about this connection or a later one, and
        not about an earlier one that had the same number.
        """
        self._read_monitor()
        fd = int(frame.get(zmq.SRCFD))
        self._fds[peer] = fd
        self._peers.setdefault(fd, set()).add(peer)

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            said = recv_monitor_message(self._monitor)
            fd = int(said["value"])
            if said["event"] == zmq.EVENT_ACCEPTED:
                self._open_fds.add(fd)
            elif said["event"] == zmq.EVENT_DISCONNECTED:
                self._open_fds.discard(fd)
                for peer in sorted(self._peers.get(fd, ())):
                    self._forget_peer(peer)

    def _forget_peer(self, peer: bytes) -> None:
        fd = self._fds.pop(peer, None)
        if fd is not None:
            self._peers[fd].discard(peer)
            if not self._peers[fd]:
                del self._peers[fd]
        self._handle_later(ClientGone(peer, "disconnected", self._to_clients.drop(peer)))

    def _reply(self, action: SendReply) -> None:
        outcome = self._to_clients.send(wire.reply_frames(action))
        peer = action.route[0]
        if outcome == "gone":
            self._events.append(ClientGone(peer, "disconnected", 1 + self._to_clients.drop(peer)))
        elif outcome == "over":
            self._events.append(ClientGone(peer, "slow", 1 + self._to_clients.drop(peer)))

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
                self.dropped_messages += 1
                self._log.error("worker said nonsense", worker=name, error=str(error))
                if name is not None:
                    kill(self._links[name])
                continue
            if isinstance(message, Hello):
                if not self._greet(identity, message):
                    continue
                name = message.worker
            if name is None:
                self.dropped_messages += 1
                continue
            self._handle(WorkerSaid(name, message))

    def _greet(self, identity: bytes, hello: Hello) -> bool:
        """Watches a new worker's process. False for one that cannot be watched, or is nobody's of this user."""
        pidfd = open_process(hello.pid)
        if pidfd is None:
            self.dropped_messages += 1
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
            frame = socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        if len(frames) <= wire.FRAMES_MAX:
            frames.append(frame)
        if not frame.more:
            return frames


def _try_send(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> Outcome:
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        return "full"
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return "gone"
    return "sent"


# ---- the process -----------------------------------------------------------------------------------------------------


def read_vocabulary(path: Path) -> Vocabulary:
    """From a model file's metadata; no weights are loaded."""
    with Engine("scalar", 1) as engine, Gguf(engine, path) as gguf:
        return Vocabulary.from_metadata(gguf.get)


def _version() -> str:
    try:
        return importlib.metadata.version("geist-pool")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def machine_config(config: BrokerConfig, tokenizer: Tokenizer) -> MachineConfig:
    return MachineConfig(
        pool=config.pool,
        version=_version(),
        model=Path(config.model_path).name,
        n_vocab=len(tokenizer.vocabulary.tokens),
        eog=tuple(sorted(tokenizer.eog)),
        has_template=tokenizer.vocabulary.chat_template is not None,
        memory=config.memory,
        queue=config.queue,
        slots=config.slots,
        kv_type=config.kv_type,
        heartbeat_s=config.heartbeat_s,
        worker_timeout_s=config.worker_timeout_s,
        max_attempts=config.max_attempts,
        keep_contexts=config.keep_contexts,
    )


def run_broker(config: BrokerConfig) -> int:
    """The whole life of a broker process; its exit status."""
    log = observe.logger("broker")
    try:
        tokenizer = Tokenizer(read_vocabulary(Path(config.model_path)))
        machine = Machine(machine_config(config, tokenizer), random.SystemRandom())
        with (
            TextJobs(tokenizer) as text,
            Loop(
                machine,
                text,
                Store(config.pool, config.kv_type),
                address=config.address,
                worker_address=config.worker_address,
                parent_fd=config.parent_fd,
                keep_contexts=config.keep_contexts,
            ) as loop,
        ):
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # ending has an order, and that is the supervisor's
            signal.signal(signal.SIGTERM, lambda *_: loop.stop())
            log.info("listening", address=config.address)
            loop.run()
    except GeistPoolError as error:
        log.error("broker ends", code=error.code, error=str(error))
        return 1
    return 0


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m geist_pool.broker.loop JSON", file=sys.stderr)
        return 2
    config = settings.broker_config(argv[1])
    observe.set_up("broker", log_format=config.log_format, log_level=config.log_level)
    return run_broker(config)


if __name__ == "__main__":
    sys.exit(main(sys.argv))

"""The pool as processes: one broker, N workers, started, watched, restarted and stopped in one place.

    with Supervisor(config) as pool:          # weights packed, every worker has said hello
        with Client(pool.config.address) as client:
            ...
    # no process, no socket and (unless keep_contexts) no shared memory is left

Start: lock of the pool's name, packing, broker, workers, and a handshake with a deadline. A worker that dies comes back after a
short pause that grows while it keeps dying. When the broker dies the workers go too, and all come back: what was in flight is
lost in any case, and sealed contexts are adopted by the new broker. Stop: the broker is asked first, so that every request still
gets an answer, then the workers, then whoever is left is killed.

Each child inherits two descriptors: the read end of a pipe, whose end of file tells it that this process is gone, and the locked
file, so that the pool's name stays taken until the last child has ended.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Self

import msgspec
from msgspec import Struct

from geist_pool import config as settings
from geist_pool import models, observe
from geist_pool.children import Child, kill_all, stop_all
from geist_pool.client import Client
from geist_pool.config import BrokerConfig, PoolConfig, WorkerConfig
from geist_pool.cores import Cores, assign, default_workers, find_cores
from geist_pool.errors import ConfigError, GeistPoolError, Internal
from geist_pool.prepare import Facts, prepare_model
from geist_pool.store import shm

BROKER: Final = "broker"
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MOST_S: Final = 5.0
STEADY_S: Final = 10.0  # a child that lived this long starts with a clean slate
LOCK_PATIENCE_S: Final = 1.0  # the children of a killed supervisor need a moment to notice


class Programs(Struct, frozen=True):
    """The modules that children run; tests put others in their place."""

    broker: str = "geist_pool.broker.loop"
    worker: str = "geist_pool.worker.main"


Prepare = Callable[[PoolConfig, Path, int, int], Facts]
"""Packs a model's weights: (config, path of the model, threads to use, lifeline) -> facts."""


def _prepare(config: PoolConfig, model: Path, threads: int, parent_fd: int) -> Facts:
    return prepare_model(model, Path(config.cache_dir), threads=threads, verify=config.verify, parent_fd=parent_fd)


class Supervisor:
    """A running pool, as a context manager.

    Entering raises ConfigError (settings, a model that is not there, a pool of this name that runs already), what the engine
    says of the model (ModelError, Unsupported), and Internal where children do not come up; nothing is left then.
    """

    def __init__(self, config: PoolConfig, *, programs: Programs | None = None, prepare: Prepare = _prepare) -> None:
        self._environment = settings.read_environment()
        self.config = settings.complete(config, self._environment)
        self.cores: Cores = find_cores()
        if self.config.workers == 0:
            n = default_workers(self.cores, self.config.threads)
            self.config = msgspec.structs.replace(self.config, workers=n)
        self.facts: Facts | None = None
        self.restarts = 0  # of children that died
        self._programs = programs or Programs()
        self._prepare = prepare
        self._log = observe.logger("supervisor")
        self._stack = ExitStack()
        self._poke = threading.Event()  # wakes the keeper
        self._lock = threading.Lock()  # guards everything below
        self._children: dict[str, Child] = {}
        self._lives: dict[str, int] = {}
        self._due: dict[str, float] = {}  # children to start, and when
        self._pauses: dict[str, float] = {}
        self._stopping = False
        self._ready = False
        self._failure: str | None = None
        self._keeper: threading.Thread | None = None

    # ---- life

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _start(self) -> None:
        model = models.resolve(self.config.model, Path(self.config.cache_dir))
        directory = settings.socket_dir(self._environment)
        settings.make_private_dir(directory)
        self._lock_fd = _take_lock(directory / f"{self.config.name}.lock", self.config.name)
        self._stack.callback(os.close, self._lock_fd)
        self._stack.callback((directory / f"{self.config.name}.lock").unlink, missing_ok=True)
        self._life_fd, held = os.pipe()
        self._stack.callback(os.close, self._life_fd)
        self._stack.callback(os.close, held)

        self.facts = self._prepare(self.config, model, self.cores.usable, self._life_fd)
        self._log.info("model ready", architecture=self.facts.architecture, fingerprint=self.facts.fingerprint[:16])
        self._configure(model)
        self._stack.callback(self._sweep)
        self._due = dict.fromkeys(self._names(), 0.0)
        self._keeper = threading.Thread(target=self._keep, name="supervisor", daemon=True)
        self._keeper.start()
        self._await_ready()

    def stop(self) -> None:
        """Stops every child and removes what the pool left; within `stop_timeout_s` and a moment. Doing it twice is allowed."""
        with _uninterrupted():
            with self._lock:
                self._stopping = True
            self._poke.set()
            if self._keeper is not None:
                self._keeper.join()
                self._keeper = None
            self._end_children()
            self._stack.close()

    def _end_children(self) -> None:
        began = time.monotonic()
        until = began + self.config.stop_timeout_s
        children = dict(self._children)
        broker = children.pop(BROKER, None)
        if broker is not None:
            stop_all([broker], signal.SIGTERM, began + self.config.stop_timeout_s / 2)
        stop_all(list(children.values()), signal.SIGTERM, until)
        late = [c for c in [*children.values(), *([broker] if broker else [])] if not c.ended]
        if late:
            self._log.warning("killed at stop", children=[c.name for c in late])
        kill_all(late)
        self._children.clear()
        if broker is not None or children:
            self._log.info("stopped", seconds=round(time.monotonic() - began, 3))

    def _sweep(self) -> None:
        """Removes sockets and, unless contexts are kept, shared memory. The lock is still held."""
        for address in (self.config.address, self._worker_address):
            if address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        if self.config.keep_contexts:
            return
        for found in shm.list_objects(self.config.name):
            shm.unlink(found.name)

    # ---- configuration of children

    def _configure(self, model: Path) -> None:
        c = self.config
        self._worker_address = settings.worker_address(self._environment, c.name)
        try:
            memory = c.memory or (settings.shm_free_bytes() + shm.total_bytes(c.name)) // 2
        except OSError as e:
            raise ConfigError(f"there is no shared memory to use at /dev/shm: {e.strerror}", path="memory") from None
        if memory == 0:
            raise ConfigError("/dev/shm is full: nothing is free for contexts", path="memory")
        self._broker = BrokerConfig(
            pool=c.name,
            model_path=str(model),
            address=c.address,
            worker_address=self._worker_address,
            memory=memory,
            parent_fd=self._life_fd,
            **_same(c, BrokerConfig),
        )
        self._worker = WorkerConfig(
            pool=c.name,
            worker="",
            worker_address=self._worker_address,
            model_path=str(model),
            parent_fd=self._life_fd,
            **_same(c, WorkerConfig),
        )
        self._cpus = assign(self.cores, c.workers, c.threads) if c.pin_cores else None

    def _launch(self, name: str) -> Child:
        """Starts a child under its next life's name. Called with the lock held."""
        life = self._lives[name] = self._lives.get(name, -1) + 1
        c: BrokerConfig | WorkerConfig
        cpus: tuple[int, ...] = ()
        if name == BROKER:
            c, program = self._broker, self._programs.broker
        else:
            c, program = msgspec.structs.replace(self._worker, worker=f"{name}.{life}"), self._programs.worker
            cpus = self._cpus[int(name[1:])] if self._cpus else ()
        c = msgspec.structs.replace(c, faults=faults_for(self.config.faults, name, life))
        command = [sys.executable, "-m", program, settings.to_json(c)]
        child = Child(name, command, lambda _: self._poke.set(), pass_fds=(self._life_fd, self._lock_fd), cpus=cpus)
        self._log.info("started", child=name, life=life, pid=child.pid, cpus=list(cpus))
        return child

    # ---- watching

    def _keep(self) -> None:
        """The keeper's thread: notices who ended, starts whoever is due."""
        while True:
            self._poke.clear()
            with self._lock:
                if self._stopping:
                    return
                for child in [c for c in self._children.values() if c.ended]:
                    self._bury(child)
                now = time.monotonic()
                for name in [n for n, at in self._due.items() if at <= now]:
                    del self._due[name]
                    try:
                        self._children[name] = self._launch(name)
                    except OSError as e:
                        self._log.error("cannot start", child=name, error=str(e))
                        self._schedule(name, 0.0)
                wait = min((at - time.monotonic() for at in self._due.values()), default=None)
            self._poke.wait(None if wait is None else max(0.0, wait))

    def _bury(self, child: Child) -> None:
        if self._children.get(child.name) is not child:
            return  # went with the broker already
        del self._children[child.name]
        self._log.warning("died", child=child.name, pid=child.pid, how=child.exit_words, lived_s=round(child.age, 3))
        if not self._ready and self._failure is None:
            self._failure = f"{child.name} ended with {child.exit_words} before the pool was ready"
        self.restarts += 1
        if child.name == BROKER:
            workers = list(self._children.values())
            self._children.clear()
            kill_all(workers)
            self.restarts += len(workers)
            pause = self._schedule(BROKER, child.age)
            self._due = dict.fromkeys(self._names(), time.monotonic() + pause)
        else:
            self._schedule(child.name, child.age)

    def _names(self) -> list[str]:
        """All children, in the order of their start."""
        return [BROKER, *(f"w{i}" for i in range(self.config.workers))]

    def _schedule(self, name: str, age: float) -> float:
        """Puts a child down for a new start; returns the pause in seconds."""
        last = 0.0 if age >= STEADY_S else self._pauses.get(name, 0.0)
        pause = self._pauses[name] = min(BACKOFF_MOST_S, last * 2) if last else BACKOFF_FIRST_S
        self._due[name] = time.monotonic() + pause
        return pause

    def _await_ready(self) -> None:
        """Returns when every worker has said hello. Raises Internal when a child ends before, or at the deadline."""
        until = time.monotonic() + self.config.ready_timeout_s
        seen = 0
        with Client(self.config.address, timeout=1.0, connect_timeout=0.2) as client:
            while True:
                if self._failure is not None:
                    raise Internal(f"the pool did not start: {self._failure}; what it said stands above")
                with suppress(GeistPoolError):
                    seen = client.stats().workers
                    if seen >= self.config.workers:
                        break
                if time.monotonic() > until:
                    raise Internal(
                        f"the pool did not start: {seen} of {self.config.workers} workers were ready "
                        f"within {self.config.ready_timeout_s:g} s"
                    )
                time.sleep(0.02)
        with self._lock:
            self._ready = True
        self._log.info("ready", address=self.config.address, workers=self.config.workers, memory=self._broker.memory)

    # ---- for the one who holds the pool

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of the children that run now, by name ("broker", "w0", ...)."""
        with self._lock:
            return {name: child.pid for name, child in self._children.items() if not child.ended}

    @property
    def memory(self) -> int:
        """Bytes of shared memory that contexts may take."""
        return self._broker.memory

    def wait(self) -> None:
        """Sleeps until a signal ends it by KeyboardInterrupt; see `signals_interrupt`."""
        threading.Event().wait()


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, by KeyboardInterrupt. Only in the main thread.

    It is put around the pool, so that a signal during the start, too, stops everything in order. What the caller ignores (SIGHUP
    under nohup) stays ignored.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    wanted = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, interrupt) for n in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def faults_for(words: tuple[str, ...], name: str, life: int) -> tuple[str, ...]:
    """The faults meant for one life of one child: "word" is for all, "w0:word" for each life of w0, "w0.0:word" for its first."""
    out: list[str] = []
    for word in words:
        target, colon, rest = word.rpartition(":")
        if not colon or target in (name, f"{name}.{life}"):
            out.append(rest)
    return tuple(out)


def _same(c: PoolConfig, kind: type[BrokerConfig] | type[WorkerConfig]) -> dict[str, Any]:
    """The settings that a child's configuration has under the same name (faults, address and memory are set apart)."""
    apart = ("faults", "address", "memory")
    return {f: getattr(c, f) for f in kind.__struct_fields__ if f in PoolConfig.__struct_fields__ and f not in apart}


def _take_lock(path: Path, name: str) -> int:
    """An open, locked descriptor with this process's id in the file. Raises ConfigError that names who holds it."""
    until = time.monotonic() + LOCK_PATIENCE_S
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file(fd, path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except BlockingIOError:
            if time.monotonic() > until:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(fd)
                words = f"a pool named {name!r} is running already (process {holder}); stop it or choose another --name"
                raise ConfigError(words, path="name") from None
        os.close(fd)
        time.sleep(0.02)


def _is_file(fd: int, path: Path) -> bool:
    """Whether the path still leads to the open file: who stops a pool removes its lock file."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Holds signals back while the pool stops: a second Ctrl-C must not leave half of it. Nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

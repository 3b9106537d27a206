"""The pool as processes: one broker, N workers, started, watched, restarted and stopped in one place.

    with Supervisor(config) as pool:          # weights packed, every worker has said hello
        with Client(pool.config.address) as client:
            ...
    # no process, no socket and (unless keep_contexts) no shared memory is left

Start: lock of the pool's name, packing, broker, workers, and a handshake with a deadline; then the ready file is written and the
service manager told. Where the model was packed before, the broker starts at once and reads the vocabulary while the weights are
compared with their checksum; workers always come behind that. A worker that dies comes back after a short pause that grows while
it keeps dying (restarts.py). When the broker dies, or gives no answer for `worker_timeout_s`, the workers go too, and all come
back: what was in flight is lost in any case, and sealed contexts are adopted by the new broker. Stop: the broker is asked first,
so that every request still gets an answer, then the workers, then whoever is left is killed.

Each child inherits two descriptors: the read end of a pipe, whose end of file tells it that this process is gone, and the locked
file, so that the pool's name stays taken until the last child has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from msgspec import Struct

from geist_pool import config as settings
from geist_pool import models, observe
from geist_pool.addresses import refuse_taken, remove_left
from geist_pool.children import Child, kill_all, stop_all
from geist_pool.config import BrokerConfig, PoolConfig, WorkerConfig
from geist_pool.cores import Cores, assign, default_workers, find_cores
from geist_pool.errors import ConfigError, GeistPoolError, Internal, PoolLost
from geist_pool.name_lock import take_lock
from geist_pool.prepare import Facts, prepare_model, was_prepared
from geist_pool.readiness import Readiness
from geist_pool.restarts import BROKER, Restarts
from geist_pool.signals import uninterrupted
from geist_pool.store import shm

SLICE_S: Final = 0.25
WATCH_S: Final = 5.0  # between two looks at whether the broker answers


class Programs(Struct, frozen=True):
    """The modules that children run; tests put others in their place."""

    broker: str = "geist_pool.broker.main"
    worker: str = "geist_pool.worker.main"


Prepare = Callable[[PoolConfig, Path, int, int], Facts]
"""Packs a model's weights: (config, path of the model, threads to use, lifeline) -> facts."""


def _prepare(config: PoolConfig, model: Path, threads: int, parent_fd: int) -> Facts:
    return prepare_model(model, Path(config.cache_dir), threads=threads, verify=config.verify, parent_fd=parent_fd)


class Supervisor:
    """A running pool, as a context manager.

    Entering raises ConfigError (settings, a model that is not there; NameTaken for a pool of this name that runs already), what
    the engine says of the model (ModelError, Unsupported), and Internal where children do not come up; nothing is left then.
    """

    def __init__(self, config: PoolConfig, *, programs: Programs | None = None, prepare: Prepare = _prepare) -> None:
        self._environment = settings.read_environment()
        self.config = settings.complete(config, self._environment)
        self._store = settings.store_key(self.config.name, self._environment)
        self.cores: Cores = find_cores()
        if self.config.workers == 0:
            n = default_workers(self.cores, self.config.threads)
            self.config = msgspec.structs.replace(self.config, workers=n)
        self.facts: Facts | None = None
        self.metrics_address: str | None = None  # HOST:PORT where Prometheus may read
        self._programs = programs or Programs()
        self._prepare = prepare
        self._log = observe.logger("supervisor")
        self._stack = ExitStack()
        self._poke = threading.Event()  # wakes the keeper
        self._lock = threading.Lock()  # guards everything below
        self._children: dict[str, Child] = {}
        self._lives: dict[str, int] = {}
        self._due: dict[str, float] = {}  # children to start, and when
        self._deaths: Counter[str] = Counter()
        self._restarts = Restarts(self._names()[1:])
        self._stopping = False
        self._packed = False  # the weights are there and sound: workers may run
        self._ready = False
        self._failure: str | None = None  # why there is no pool, or no more
        self._over = threading.Event()  # set when the pool stops or has failed
        self._threads: list[threading.Thread] = []
        self._readiness = Readiness(
            Path(self.config.ready_file) if self.config.ready_file else None, self._environment.notify_socket
        )

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
        self._lock_fd = take_lock(directory / f"{self.config.name}.lock", self.config.name)
        self._stack.callback(os.close, self._lock_fd)
        self._stack.callback((directory / f"{self.config.name}.lock").unlink, missing_ok=True)
        refuse_taken(self.config.address)
        self._readiness.prepare()
        if self.config.saved_dir:
            settings.make_private_dir(Path(self.config.saved_dir), "saved_dir")
        self._life_fd, held = os.pipe()
        self._stack.callback(os.close, self._life_fd)
        self._stack.callback(os.close, held)

        if not self.config.verify and was_prepared(model, Path(self.config.cache_dir)):
            self._set_up(model)
            self._pack(model)
        else:  # nothing is known of this file: a fault of it is to be the only one that is told
            self._pack(model)
            self._set_up(model)
        with self._lock:
            self._packed = True
            self._due |= dict.fromkeys(self._names()[1:], 0.0)
        self._poke.set()
        self._await_ready()
        self._run(self._watch_broker, "watchdog")
        facts: dict[str, str | int] = {"pid": os.getpid(), "name": self.config.name, "address": self.config.address}
        if self.config.metrics:
            from geist_pool.metrics import MetricsServer  # a pool without metrics loads nothing of them

            server = self._stack.enter_context(MetricsServer(self.config.metrics, self.config.address, lambda: self.deaths))
            facts["metrics"] = self.metrics_address = server.address
            self._log.info("metrics", address=server.address)
        self._readiness.announce(**facts)

    def _pack(self, model: Path) -> None:
        self.facts = self._prepare(self.config, model, self.cores.usable, self._life_fd)
        self._log.info("model ready", architecture=self.facts.architecture, fingerprint=self.facts.fingerprint[:16])

    def _set_up(self, model: Path) -> None:
        """Starts the keeper, with the broker as the first that is due."""
        self._configure(model)
        self._stack.callback(self._sweep)
        self._due = {BROKER: 0.0}
        self._run(self._keep, "supervisor")

    def _run(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """Stops every child and removes what the pool left; within `stop_timeout_s` and a moment. Doing it twice is allowed."""
        with uninterrupted():
            self._readiness.withdraw()
            with self._lock:
                self._stopping = True
            self._over.set()
            self._poke.set()
            for thread in self._threads[:1]:
                thread.join()  # the keeper, so that nobody is started any more
            self._end_children()
            for thread in self._threads[1:]:
                thread.join()  # the watchdog may have waited for the broker's answer
            self._threads.clear()
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
            remove_left(address)
        objects = shm.list_objects(self._store)
        if self.config.keep_contexts and objects:
            return
        Path(self._broker.bindings).unlink(missing_ok=True)
        for found in objects:
            shm.unlink(found.name)

    # ---- configuration of children

    def _configure(self, model: Path) -> None:
        c = self.config
        self._worker_address = settings.worker_address(self._environment, c.name)
        try:
            memory = c.memory or (settings.shm_free_bytes() + shm.total_bytes(self._store)) // 2
        except OSError as e:
            raise ConfigError(f"there is no shared memory to use at /dev/shm: {e.strerror}", path="memory") from None
        if memory == 0:
            raise ConfigError("/dev/shm is full: nothing is free for contexts", path="memory")
        self._broker = BrokerConfig(
            pool=c.name,
            store=self._store,
            model_path=str(model),
            address=c.address,
            worker_address=self._worker_address,
            memory=memory,
            bindings=str(settings.socket_dir(self._environment) / f"{c.name}.bindings"),
            parent_fd=self._life_fd,
            **_same(c, BrokerConfig),
        )
        self._worker = WorkerConfig(
            store=self._store,
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
        command = [sys.executable, "-P", "-m", program, settings.to_json(c)]
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
                if self._failure is not None and self._ready:
                    self._give_up()
                    return
                now = time.monotonic()
                for name in [n for n, at in self._due.items() if at <= now]:
                    del self._due[name]
                    try:
                        self._children[name] = self._launch(name)
                    except OSError as e:
                        self._log.error("cannot start", child=name, error=str(e))
                        self._due[name] = now + self._note_death(name, 0.0, f"cannot be started: {e}")
                wait = min((at - time.monotonic() for at in self._due.values()), default=None)
            self._poke.wait(None if wait is None else max(0.0, wait))

    def _bury(self, child: Child) -> None:
        """Notes that a child has ended, and when it is due again. Called with the lock held."""
        if self._children.get(child.name) is not child:
            return  # went with the broker already
        del self._children[child.name]
        pause = self._note_death(child.name, child.age, f"ended with {child.exit_words}")
        self._log.warning(
            "died", child=child.name, pid=child.pid, how=child.exit_words, lived_s=round(child.age, 3), pause_s=round(pause, 3)
        )
        names = [child.name]
        if child.name == BROKER:
            names = self._names() if self._packed else [BROKER]
            workers = list(self._children.values())
            self._children.clear()
            kill_all(workers)
            self._deaths.update(c.name for c in workers)
        self._due |= dict.fromkeys(names, time.monotonic() + pause)

    def _note_death(self, name: str, age: float, how: str) -> float:
        """Counts it and judges whether it ends the pool; the pause in seconds before the next life. With the lock held."""
        self._deaths[name] += 1
        pause = self._restarts.died(name, age)
        if self._ready:
            self._failure = self._restarts.hopeless({n: c.age for n, c in self._children.items() if not c.ended})
        elif self._failure is None and self._restarts.start_failed(name):
            times = f", {self._deaths[name]} times in a row," if self._deaths[name] > 1 else ""
            self._failure = f"{name} {how}{times} before the pool was ready"
        return pause

    def _give_up(self) -> None:
        """Ends what still lives, so that no client waits for a pool that will not come back. Called with the lock held."""
        self._log.error("giving up", why=self._failure)
        self._due.clear()
        kill_all(list(self._children.values()))
        self._over.set()

    def _names(self) -> list[str]:
        """All children, in the order of their start."""
        return [BROKER, *(f"w{i}" for i in range(self.config.workers))]

    def _watch_broker(self) -> None:
        """The watchdog's thread: a broker that has answered once and then says nothing for `worker_timeout_s` is killed."""
        from geist_pool.client.sync import Client

        patience = self.config.worker_timeout_s
        answered: tuple[Child | None, float] = (None, 0.0)  # who did last, and when
        with Client(self.config.address, timeout=patience, connect_timeout=min(1.0, patience)) as client:
            while not self._over.wait(min(WATCH_S, patience / 2)):
                with self._lock:
                    asked = self._children.get(BROKER)
                try:
                    client.stats()
                    answered = (asked, time.monotonic())
                except GeistPoolError as e:
                    if asked is None or asked is not answered[0] or time.monotonic() - answered[1] < patience:
                        continue
                    with self._lock:
                        if self._children.get(BROKER) is asked and not self._stopping:
                            self._log.error("broker gives no answer; killing it", pid=asked.pid, error=str(e))
                            asked.send(signal.SIGKILL)

    def _await_ready(self) -> None:
        """Returns when every worker has said hello. Raises Internal when a child ends before, or at the deadline."""
        from geist_pool.client.sync import Client  # the broker starts sooner where this is loaded behind its start

        until = time.monotonic() + self.config.ready_timeout_s
        seen = 0
        with Client(self.config.address, timeout=1.0, connect_timeout=0.2) as client:
            while True:
                if self._failure is not None:
                    raise Internal(f"the pool did not start: {self._failure}; what it said stands above")
                with suppress(GeistPoolError):
                    found = client.info()
                    seen = found.workers if found.pool == self.config.name else 0  # another pool may answer there
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

    @property
    def deaths(self) -> Mapping[str, int]:
        """How often each child has died and come back, or will soon."""
        with self._lock:
            return dict(self._deaths)

    @property
    def restarts(self) -> int:
        """How often children have died, all together."""
        return sum(self.deaths.values())

    def wait(self) -> None:
        """Sleeps until a signal ends it by KeyboardInterrupt; see `signals.signals_interrupt`.

        Raises PoolLost when the pool has given up because its processes died again and again.
        """
        while not self._over.wait(SLICE_S):  # a signal that comes just before a wait begins is noticed only when it ends
            pass
        if self._failure is not None:
            raise PoolLost(f"the pool gave up: {self._failure}; what they said stands above")


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

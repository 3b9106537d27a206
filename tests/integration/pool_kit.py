"""What the tests of whole pools share: the measure, and a pool that may leave nothing behind."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from geist_pool import engine
from geist_pool.client import Client
from geist_pool.config import PoolConfig, store_key
from geist_pool.protocol import Sampling
from geist_pool.store import shm
from geist_pool.supervisor import Supervisor


class Reference:
    """A session of its own in this process: what everything must equal. From any thread; the engine takes one at a time."""

    def __init__(self, path: Path, cache: Path) -> None:
        self._lock = threading.Lock()
        self.engine = engine.Engine("auto", 1)
        self.model = engine.Model(self.engine, path, cache_dir=cache)

    def close(self) -> None:
        self.model.close()
        self.engine.close()

    def generate(self, tokens: tuple[int, ...], n: int, sampling: Sampling | None = None) -> tuple[int, ...]:
        out: list[int] = []
        with self._lock, engine.Session(self.model) as session:
            session.prefill(tokens)
            session.set_sampler(sampling or Sampling())
            for _ in range(n):
                out.append(session.sample())
                session.decode(out[-1])
        return tuple(out)

    def score(self, tokens: tuple[int, ...], label: tuple[int, ...]) -> tuple[float, ...]:
        with self._lock, engine.Session(self.model) as session:
            session.prefill(tokens)
            return tuple(float(x) for x in session.score(label))


@contextmanager
def private_run_dir() -> Iterator[Path]:
    """Sockets and locks lie in a directory of their own, with a short path as sockets need it; nothing may be left there."""
    with tempfile.TemporaryDirectory(prefix="gp-") as run, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", run)
        yield Path(run)
        assert list((Path(run) / "geist-pool").iterdir()) == []


@contextmanager
def running(config: PoolConfig) -> Iterator[Supervisor]:
    """A pool that may leave nothing in shared memory."""
    with Supervisor(config) as pool:
        yield pool
    assert shm.list_objects(store_key(config.name)) == []


def ids(client: Client, *texts: str) -> tuple[int, ...]:
    return tuple(t for text in texts for t in client.tokenize(text).tokens)


def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)

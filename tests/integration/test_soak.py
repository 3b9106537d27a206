"""Thousands of contexts and requests through one pool: what it holds of memory does not grow.

Property: once what is bounded is full (512 remembered answers, the last 4,000 transitions of the story, allocators' caches),
resident memory of broker and workers grows by less than 1 % and the bytes in shared memory stay where the limit keeps them;
every request is answered, and what is left in the end is nothing. A thousand publishes or small requests fill all that.
Tolerance: 1 % over the whole run, or, in the short run that is the default, SLACK bytes, since some pages of an allocator are no
growth; both are far below what a kilobyte lost with each request would add. FINDINGS row 17.

GEIST_POOL_SOAK=1 runs 10,000 publishes and 100,000 requests and takes some minutes; GEIST_POOL_SOAK_REPORT names a file for the
figures.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from geist_pool.client import Client
from geist_pool.config import PoolConfig, store_key
from geist_pool.errors import UnknownContext
from geist_pool.protocol import Publish
from geist_pool.store import shm
from geist_pool.supervisor import Supervisor

FULL = os.environ.get("GEIST_POOL_SOAK") == "1"
PUBLISHES, REQUESTS = (10_000, 100_000) if FULL else (1_800, 5_000)
SETTLED_PUBLISHES, SETTLED_REQUESTS = 1_000, 1_000  # after which nothing may grow
CLIENTS = 4
ROUND = 100  # requests that one client makes before another connection takes its place
MEMORY = 8 << 20
GROWTH = 0.01
SLACK = 640 << 10  # of a process in the short run
STORY = "Hesper keeps the inn on the wrong bank, Odo keeps the ferry, and the river keeps what falls in. " * 3


class Sample(Struct, frozen=True):
    """After `done` requests of a kind: resident bytes by process without the contexts that it has mapped (those come and go under
    the store's limit), bytes of the pool's named objects, and what the broker counts."""

    done: int
    rss: dict[str, int]
    shm: int
    store: int
    contexts: int


class Soak:
    """`n` numbered requests by CLIENTS clients at a time, and a sample of the pool after each `every` of them; after `settled` it
    shall not grow."""

    def __init__(self, pool: Supervisor, n: int, every: int, settled: int, ask: Callable[[Client, int], object]) -> None:
        self.samples: list[Sample] = []
        self.errors: list[BaseException] = []
        self._pool = pool
        self._settled = settled
        self._ask = ask
        self._rounds = iter(range(0, n, ROUND))
        self._every = every
        self._done = 0
        self._lock = threading.Lock()
        threads = [threading.Thread(target=self._work) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        try:
            while True:
                with self._lock:
                    start = next(self._rounds, None)
                if start is None or self.errors:
                    return
                with Client(self._pool.config.address, timeout=60) as client:
                    for i in range(start, start + ROUND):
                        self._ask(client, i)
                    with self._lock:
                        self._done += ROUND
                        if self._done % self._every == 0:
                            self.samples.append(self._look(client))
        except BaseException as error:
            self.errors.append(error)

    def _look(self, client: Client) -> Sample:
        stats = client.stats()
        rss = {name: resident(pid) for name, pid in self._pool.pids.items()}
        named = sum(found.n_bytes for found in shm.list_objects(store_key(self._pool.config.name)))
        return Sample(self._done, rss, named, stats.store_bytes, stats.contexts)

    def growth(self) -> dict[str, tuple[int, int]]:
        """By process: bytes when it had settled, and the median of the last third."""
        later = [s for s in self.samples if s.done > self._settled]
        third = later[-max(1, len(later) // 3) :]
        settled = max((s for s in self.samples if s.done <= self._settled), key=lambda s: s.done)
        return {name: (settled.rss[name], sorted(s.rss[name] for s in third)[len(third) // 2]) for name in settled.rss}


def resident(pid: int) -> int:
    """Bytes of a process that are in memory, shared memory left out."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


def report(kind: str, soak: Soak) -> None:
    where = os.environ.get("GEIST_POOL_SOAK_REPORT")
    if where:
        with Path(where).open("ab") as file:
            file.write(msgspec.json.encode({"kind": kind, "samples": soak.samples, "growth": soak.growth()}) + b"\n")


def check(soak: Soak) -> None:
    assert not soak.errors, soak.errors
    assert all(s.shm <= MEMORY and s.store <= MEMORY for s in soak.samples)
    for name, (settled, last) in soak.growth().items():
        grown = last - settled
        assert grown < (GROWTH * settled if FULL else SLACK), f"{name} grew from {settled} by {grown} bytes"


@pytest.fixture
def pool(
    tiny_model: Callable[..., Path], packed_dir: Path, new_pool_name: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Supervisor]:
    with tempfile.TemporaryDirectory(prefix="gp-") as run:
        monkeypatch.setenv("XDG_RUNTIME_DIR", run)
        config = PoolConfig(
            name=new_pool_name(), model=str(tiny_model("qwen35-tiny")), workers=2, cache_dir=str(packed_dir), memory=MEMORY,
            log_level="error", pin_cores=False,
        )  # fmt: skip
        with Supervisor(config) as made:
            yield made
            assert made.restarts == 0
        assert shm.list_objects(store_key(config.name)) == []


def test_publishes_leave_memory_as_it_is(pool: Supervisor) -> None:
    """Contexts of text, on top of others, named again and again, with a time to live, and from answers: far more than fit."""

    def publish(client: Client, i: int) -> None:
        if i % 8 == 3:
            got = client.generate(
                f" Turn {i}:", context="base", max_tokens=8, ignore_eog=True, publish=Publish(name=f"told {i % 5}")
            )
            assert got.published is not None, got.publish_error
        elif i % 8 == 5:
            made = client.create_context(f"{i} {STORY}", ttl_s=1 + i % 3)
            assert made.created
            with suppress(UnknownContext):  # its time may be over, or others may have needed the room
                client.create_context(f" And {i} goes on.", on=made.context.id)
        else:
            assert client.create_context(f" {i} {STORY}", on="base", name=f"turn {i % 7}").created

    with Client(pool.config.address) as client:
        client.create_context(STORY, name="base", pin=True)
        soak = Soak(pool, PUBLISHES, 200 if FULL else 100, SETTLED_PUBLISHES, publish)
        report("publishes", soak)
        check(soak)
        settled = [s for s in soak.samples if s.done >= SETTLED_PUBLISHES]
        full = max(s.store for s in settled)
        assert full > 0.9 * MEMORY, "the limit was never reached, so that nothing is shown"
        assert client.stats().evictions > PUBLISHES // 2
        client.drop_context("base")


def test_requests_leave_memory_as_it_is(pool: Supervisor) -> None:
    """Answers, streams, scores, prompts without a context, refusals and cheap questions, by clients that come and go."""

    def ask(client: Client, i: int) -> None:
        kind = i % 10
        if kind == 0:
            with client.stream(f" {i}", context="base", max_tokens=3, ignore_eog=True) as stream:
                assert len(stream.result().tokens) == 3
        elif kind == 1:
            assert len(client.score(f" {i}", [" yes", " no"], context="base").labels) == 2
        elif kind == 2:
            assert client.generate(f"{i}", max_tokens=1, ignore_eog=True).usage.reused == 0
        elif kind == 3:
            assert client.tokenize(f"{i} {STORY}").tokens
        elif kind == 4:
            with Client(pool.config.address, space=f"space {i % 1000}") as other:
                assert other.contexts() == ()
        elif kind == 5:
            assert client.info().n_vocab == 512 and client.stats().workers == 2
        else:
            assert client.generate(f" {i}", context="base", max_tokens=2, ignore_eog=True).usage.reused > 0

    with Client(pool.config.address) as client:
        client.create_context(STORY, name="base", pin=True)
        soak = Soak(pool, REQUESTS, 500, SETTLED_REQUESTS, ask)
        report("requests", soak)
        check(soak)
        assert len({s.shm for s in soak.samples}) == 1

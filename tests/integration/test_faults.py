"""Processes of a pool that die or fall silent at the worst moment.

Property: whatever is killed or stopped, at each named point of a worker and at random moments of the broker, every request ends,
with the answer that one session gives alone, bit for bit, or with an error that says what happened; the process comes back; and
nothing is left in shared memory, among the processes, the sockets or the saved files. Tolerance: none. Reason: FINDINGS rows 14
(requests hang while health is green) and 15 (readers crash, locks and segments leak). Waits have generous limits; no duration is
asserted. Random moments come from a seed that a failure shows.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from pool_kit import Reference, ids, private_run_dir, running, until

from geist_pool import errors
from geist_pool.client import Client
from geist_pool.config import PoolConfig, store_key
from geist_pool.protocol import Publish, Sampling
from geist_pool.store import shm
from geist_pool.supervisor import Supervisor
from geist_pool.worker.faults import POINTS

STORY = "Hesper keeps the inn on the wrong bank, Odo keeps the ferry, and the river keeps what falls in. " * 4
SUFFIX = "\nNip says:"
LABELS = (" yes", " no", " the river keeps")
SEED = 20_261_129


@pytest.fixture(scope="module")
def reference(tiny_model: Callable[..., Path], packed_dir: Path) -> Iterator[Reference]:
    made = Reference(tiny_model("qwen35-tiny"), packed_dir)
    yield made
    made.close()


@pytest.fixture
def make_config(
    tiny_model: Callable[..., Path], packed_dir: Path, tmp_path: Path, new_pool_name: Callable[[], str]
) -> Iterator[Callable[..., PoolConfig]]:
    """Pools of two workers whose saved files lie in `tmp_path / "saved"`."""
    with private_run_dir():
        fields = {
            "model": str(tiny_model("qwen35-tiny")), "workers": 2, "cache_dir": str(packed_dir), "memory": 64 << 20,
            "log_level": "error", "pin_cores": False, "saved_dir": str(tmp_path / "saved"),
        }  # fmt: skip
        yield lambda **changes: PoolConfig(**{**fields, "name": new_pool_name(), **changes})


def ask_everything(client: Client, reference: Reference, who: str) -> None:
    """One request of each kind, so that together they pass every point; each answer is compared with the measure."""
    story = ids(client, f"{who} {STORY}")
    suffix = ids(client, SUFFIX)
    base, told = f"{who} base", f"{who} told"
    client.create_context(f"{who} {STORY}", name=base)
    expected = reference.generate(story + suffix, 12)
    assert client.generate(SUFFIX, context=base, max_tokens=12, ignore_eog=True).tokens == expected
    with client.stream(SUFFIX, context=base, max_tokens=12, ignore_eog=True) as stream:
        assert tuple(t for chunk in stream for t in chunk.tokens) == expected == stream.result().tokens
    hot = Sampling(temperature=1.5, seed=7)
    kept = client.generate(SUFFIX, context=base, max_tokens=12, ignore_eog=True, sampling=hot, publish=Publish(name=told))
    assert kept.tokens == reference.generate(story + suffix, 12, hot) and kept.published is not None
    check_state(client, reference, told, story + suffix + kept.tokens)
    client.save_context(told)
    client.drop_context(told)
    client.load_context(told)
    check_state(client, reference, told, story + suffix + kept.tokens)


def check_state(client: Client, reference: Reference, context: str, tokens: tuple[int, ...]) -> None:
    got = client.score(None, LABELS, context=context)
    assert [label.logprobs for label in got.labels] == [reference.score(tokens, label.tokens) for label in got.labels]


def check_nothing_leaked(pool: Supervisor, client: Client) -> None:
    """Once everyone has forgotten what is gone, the objects are the contexts' own, and the processes the pool's."""
    until(lambda: len(pool.pids) == 3 and client.stats().workers == 2)
    until(lambda: client.stats().store_unmapping_bytes == 0)
    stats, objects = client.stats(), shm.list_objects(store_key(pool.config.name))
    assert sum(found.n_bytes for found in objects) == stats.store_bytes
    assert (stats.workers_busy, stats.queue, stats.requests_active) == (0, 0, 0)
    ours = {p.pid for p in psutil.Process().children() if "geist_pool" in " ".join(p.cmdline())}
    assert set(pool.pids.values()) == ours
    for context in client.contexts():
        client.drop_context(context.id)
    until(lambda: client.stats().store_bytes == 0)
    assert shm.list_objects(store_key(pool.config.name)) == []


def saved_files(config: PoolConfig) -> list[str]:
    return [p.name for p in Path(config.saved_dir).rglob("*") if p.is_file()]


# ---- workers


@pytest.mark.parametrize("point", POINTS)
def test_worker_killed_at(point: str, make_config: Callable[..., PoolConfig], reference: Reference) -> None:
    """FINDINGS rows 14 and 15: no request fails, since each is done again by another worker."""
    config = make_config(faults=(f"w0.0:kill-{point}",))
    with running(config) as pool, Client(pool.config.address, timeout=60) as client:
        before = pool.pids["w0"]
        for i in range(8):
            ask_everything(client, reference, f"{point} {i}")
            if pool.pids.get("w0") != before:
                break
            client.score(STORY, LABELS)  # so that the workers' turns change
        until(lambda: pool.pids.get("w0", before) != before)
        assert pool.deaths == {"w0": 1}
        ask_everything(client, reference, "again")
        stats = client.stats()
        assert (stats.workers_lost, stats.jobs_retried, stats.errors) == (1, 1, {})
        client.save_context("again told", saved="the last")  # whoever writes next removes what a killed writer left
        assert not [name for name in saved_files(pool.config) if name.startswith(".")]
        check_nothing_leaked(pool, client)


@pytest.mark.parametrize("point", ["attach", "prefill", "seal", "decode", "score", "reply"])
def test_worker_stopped_at(point: str, make_config: Callable[..., PoolConfig], reference: Reference) -> None:
    """FINDINGS row 14: a process that lives and does nothing is a dead one after a deadline."""
    config = make_config(faults=(f"w0.0:stop-{point}",), heartbeat_s=0.1, worker_timeout_s=1.0)
    with running(config) as pool, Client(pool.config.address, timeout=60) as client:
        before = pool.pids["w0"]
        for i in range(8):
            ask_everything(client, reference, f"{point} {i}")
            if pool.pids.get("w0") != before:
                break
            client.score(STORY, LABELS)  # so that the workers' turns change
        until(lambda: pool.pids.get("w0", before) != before)
        assert not psutil.pid_exists(before)
        ask_everything(client, reference, "again")
        assert client.stats().errors == {}
        check_nothing_leaked(pool, client)


@pytest.mark.parametrize("point", POINTS)
def test_request_that_kills_whoever_tries(point: str, make_config: Callable[..., PoolConfig], reference: Reference) -> None:
    """FINDINGS row 14: both of its workers die, so it ends with an error, and the pool goes on."""
    config = make_config(faults=tuple(f"w{i}.0:kill-{point}" for i in range(2)))
    with running(config) as pool, Client(pool.config.address, timeout=60) as client:
        lost = 0
        while not lost:
            try:
                ask_everything(client, reference, f"{point} {lost}")
            except errors.WorkerLost as error:
                assert "2 workers died" in error.message
                lost += 1
        until(lambda: pool.deaths == {"w0": 1, "w1": 1} and len(pool.pids) == 3)
        ask_everything(client, reference, "again")
        assert client.stats().errors == {"worker_lost": 1}
        check_nothing_leaked(pool, client)


# ---- anybody, at any moment


class Load:
    """Clients that ask one question after another until told to stop; what did not end well is in `errors`."""

    def __init__(self, pool: Supervisor, reference: Reference, n: int = 3) -> None:
        self.done = 0
        self.errors: list[errors.GeistPoolError] = []
        self._pool = pool
        self._reference = reference
        self._over = threading.Event()
        self._threads = ThreadPoolExecutor(n)
        with Client(pool.config.address, timeout=60) as client:
            self._story, self._suffix = ids(client, STORY), ids(client, SUFFIX)
        self._work = [self._threads.submit(self._ask, i) for i in range(n)]

    def _ask(self, who: int) -> None:
        with Client(self._pool.config.address, timeout=60, connect_timeout=60) as client:
            i = 0
            while not self._over.is_set():
                i += 1
                try:
                    self._one(client, f"{who}.{i}", i)
                except errors.GeistPoolError as error:
                    self.errors.append(error)
                self.done += 1

    def _one(self, client: Client, name: str, i: int) -> None:
        tokens = self._story + self._suffix
        if i % 3 == 0:
            made = client.create_context(f"{STORY}{SUFFIX} {name}").context
            check_state(client, self._reference, made.id, self._story + ids(client, f"{SUFFIX} {name}"))
        elif i % 3 == 1:
            sampling = Sampling(temperature=1.2, seed=i)
            answer = client.generate(SUFFIX, context="inn", max_tokens=10, ignore_eog=True, sampling=sampling)
            assert answer.tokens == self._reference.generate(tokens, 10, sampling)
        else:
            with client.stream(SUFFIX, context="inn", max_tokens=10, ignore_eog=True) as stream:
                got = [t for chunk in stream for t in chunk.tokens]
            assert tuple(got) == self._reference.generate(tokens, 10)

    def stop(self) -> None:
        """Every request has ended when this returns. Raises what went wrong."""
        self._over.set()
        for work in self._work:
            work.result(timeout=120)
        self._threads.shutdown()


@pytest.mark.parametrize("victims", [("broker",), ("w0", "w1"), ("w0", "broker", "w1")], ids=lambda v: "-".join(v))
def test_killed_at_random_moments_under_load(
    victims: tuple[str, ...], make_config: Callable[..., PoolConfig], reference: Reference
) -> None:
    """FINDINGS rows 14 and 15. Clients send a request again when the broker comes back, so most of them notice nothing."""
    dice = random.Random(SEED + len(victims))
    config = make_config(max_attempts=16)
    with running(config) as pool, Client(pool.config.address, timeout=60, connect_timeout=60) as client:
        client.create_context(STORY, name="inn", pin=True)
        load = Load(pool, reference)
        try:
            for i in range(4):
                time.sleep(dice.uniform(0.05, 0.6))
                victim = victims[i % len(victims)]
                until(lambda: len(pool.pids) == 3)
                before = pool.pids
                os.kill(before[victim], signal.SIGKILL)
                until(lambda v=victim, b=before: pool.pids.get(v, b[v]) != b[v])
                n = load.done
                until(lambda n=n: load.done > n + 6)  # it goes on
        finally:
            load.stop()
        assert {type(error) for error in load.errors} <= {errors.NoAnswer}, f"seed {SEED}: {load.errors}"
        if "broker" not in victims:
            assert load.errors == [] and client.stats().errors == {}
        check_nothing_leaked(pool, client)


@pytest.mark.parametrize("retries", [0, 3])
def test_broker_killed_while_a_worker_publishes(
    retries: int, make_config: Callable[..., PoolConfig], reference: Reference
) -> None:
    """FINDINGS row 15: what was half-written goes; the request is done anew if its client asks again."""
    config = make_config(faults=("slow-seal=400",))
    with (
        running(config) as pool,
        Client(pool.config.address, timeout=60, connect_timeout=60, retries=retries) as client,
        ThreadPoolExecutor(1) as thread,
    ):
        store = store_key(pool.config.name)
        making = thread.submit(client.create_context, STORY, name="inn")
        until(lambda: len(shm.list_objects(store)) == 2)
        before = pool.pids
        os.kill(before["broker"], signal.SIGKILL)
        if retries:
            assert making.result(timeout=60).created
        else:
            with pytest.raises(errors.NoAnswer):
                making.result(timeout=60)
        until(lambda: len(pool.pids) == 3 and not set(pool.pids.values()) & set(before.values()))
        with Client(pool.config.address, timeout=60, connect_timeout=60) as other:
            assert len(other.contexts()) == (1 if retries else 0)
            assert len(shm.list_objects(store)) == 2 * len(other.contexts())
            if retries:
                check_state(other, reference, "inn", ids(other, STORY))
            check_nothing_leaked(pool, other)


def test_stopped_broker_is_replaced(make_config: Callable[..., PoolConfig], reference: Reference) -> None:
    """FINDINGS row 14: the broker too may live and answer nobody."""
    config = make_config(worker_timeout_s=1.5, heartbeat_s=0.2)
    with running(config) as pool, Client(pool.config.address, timeout=60, connect_timeout=60) as client:
        client.create_context(STORY, name="inn")
        before = pool.pids
        time.sleep(2.0)  # the watchdog has heard it answer at least once
        os.kill(before["broker"], signal.SIGSTOP)
        until(lambda: len(pool.pids) == 3 and not set(pool.pids.values()) & set(before.values()))
        check_state(client, reference, "inn", ids(client, STORY))
        assert client.score(None, LABELS, context="inn").usage.reused == len(ids(client, STORY))
        check_nothing_leaked(pool, client)

"""Whether a busy pool still says how it is, and how soon it is itself again after a death.

    python -m bench.health [--quick] [--workers 2] [--clients 8]

Health: `stats` and `info` from a process of their own, one after the other, while more clients than there are workers have long
answers generated behind fresh prompts, so that every worker prefills and decodes all the time, and two have texts of most of a
megabyte tokenised. A worker's death: it is killed in the middle of a stream; the longest wait for the next chunk, beside what a
prefill of the same suffix takes. (Another worker says everything again up to there, so the wait grows with what had been said.)
The broker's death: it is killed with --contexts contexts in shared memory; until it answers, and until all of them can be found
again. That answers are right and complete is checked; no time is.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bench.harness import (
    Book,
    Check,
    arguments,
    fetched_model,
    finish,
    machine_facts,
    run,
)
from bench.pools import running
from geist_pool import observe
from geist_pool.client import Client
from geist_pool.demo.world import CONTEXT_TEXT
from geist_pool.errors import GeistPoolError
from geist_pool.supervisor import Supervisor

ASKED, QUICK_ASKED = 2000, 200
DEATHS, QUICK_DEATHS = 5, 1
BIG_TEXT = CONTEXT_TEXT * 250
SUFFIX = '\n\nAsked what she thinks of it all, Hesper says: "If I had wanted a quiet life,'
ANSWER = 200  # tokens of a stream in whose middle a worker dies
GRACE_S = 60.0
PAUSE_S = 0.005


class Load:
    """`n` clients that keep every worker busy with prefill and decoding, and two that have big texts tokenised."""

    def __init__(self, address: str, n: int) -> None:
        self.requests = self.tokens = self.tokenised = 0
        self.errors: list[GeistPoolError] = []
        self._address = address
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._generate, args=(i,)) for i in range(n)]
        self._threads += [threading.Thread(target=self._tokenise) for _ in range(2)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _generate(self, who: int) -> None:
        with Client(self._address, timeout=None) as client:
            for i in itertools.count():
                if self._over.is_set():
                    return
                try:
                    answer = client.generate(f"{who}, {i}. {CONTEXT_TEXT[:1500]}", max_tokens=48, ignore_eog=True)
                except GeistPoolError as error:
                    self.errors.append(error)
                    return
                self.requests += 1
                self.tokens += len(answer.tokens)

    def _tokenise(self) -> None:
        with Client(self._address, timeout=None) as client:
            while not self._over.is_set():
                try:
                    client.tokenize(BIG_TEXT)
                except GeistPoolError as error:
                    self.errors.append(error)
                    return
                self.tokenised += 1


def seconds_of(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def until(what: Callable[[], bool]) -> float:
    """Seconds until it holds. Raises TimeoutError."""
    start = time.perf_counter()
    while not what():
        if time.perf_counter() - start > GRACE_S:
            raise TimeoutError("the pool did not recover")
        time.sleep(0.002)
    return time.perf_counter() - start


def at(samples: tuple[float, ...], q: float) -> float:
    """The value below which a share `q` of the samples lies."""
    return sorted(samples)[min(len(samples) - 1, int(q * len(samples)))]


def ask(address: str, n: int, pause_s: float) -> tuple[dict[str, list[float]], list[int]]:
    """Seconds of each `stats` and `info`, and how many workers were busy each time. It runs in a process of its own: the threads
    of the load would keep the interpreter's lock from it, and that would be measured."""
    taken: dict[str, list[float]] = {"stats": [], "info": []}
    busy: list[int] = []
    with Client(address, timeout=None) as client:
        for _ in range(n):
            taken["stats"].append(seconds_of(lambda: busy.append(client.stats().workers_busy)))
            taken["info"].append(seconds_of(client.info))
            time.sleep(pause_s)  # else the questions themselves would be the load
    return taken, busy


def measure_health(pool: Supervisor, args: Any, book: Book) -> tuple[list[Check], dict[str, Any]]:
    asked, address = QUICK_ASKED if args.quick else ASKED, pool.config.address
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        idle, _ = other.submit(ask, address, asked, 0.0).result()
        with Load(address, args.clients) as load:
            until(lambda: load.requests >= args.clients and load.tokenised > 0)
            loaded, busy = other.submit(ask, address, asked, PAUSE_S).result()
    samples = {f"{what}, {how}": taken[what] for how, taken in (("idle", idle), ("loaded", loaded)) for what in taken}
    book.add("health", samples, {name: {} for name in samples})
    times = tuple(loaded["stats"] + loaded["info"])
    full = sum(n == pool.config.workers for n in busy)
    checks = [
        Check(what="every request of the load was answered", n=load.requests, failed=len(load.errors)),
        Check(what="all workers were busy nine times out of ten", n=1, failed=int(full < 0.9 * len(busy))),
    ]
    facts = {
        "health_p50_ms": 1e3 * at(times, 0.5),
        "health_p99_ms": 1e3 * at(times, 0.99),
        "health_most_ms": 1e3 * max(times),
        "load_requests": load.requests,
        "load_tokens_generated": load.tokens,
        "load_texts_tokenised": load.tokenised,
        "load_text_bytes": len(BIG_TEXT),
    }
    return checks, facts


def measure_worker_deaths(pool: Supervisor, args: Any, book: Book) -> tuple[list[Check], dict[str, Any]]:
    """A stream whose worker is killed after half of it: the longest time between two chunks from then on."""
    gaps: list[float] = []
    prefills: list[float] = []
    wrong = 0
    with Client(pool.config.address, timeout=None) as client:
        client.create_context(CONTEXT_TEXT, name="inn")
        whole = client.generate(SUFFIX, context="inn", max_tokens=ANSWER, ignore_eog=True)
        for _ in range(QUICK_DEATHS if args.quick else DEATHS):
            until(lambda: client.stats().workers == pool.config.workers)
            prefills.append(client.generate(SUFFIX, context="inn", max_tokens=1).timings.prefill * 1e-6)
            gap = 0.0
            with client.stream(SUFFIX, context="inn", max_tokens=ANSWER, ignore_eog=True) as stream:
                for chunk in stream:
                    if chunk.index == ANSWER // 2:
                        _kill_busy(pool, client)
                        last = time.perf_counter()
                    elif chunk.index > ANSWER // 2:
                        now = time.perf_counter()
                        gap, last = max(gap, now - last), now
                answer = stream.result()
            wrong += int(answer.tokens != whole.tokens or answer.attempts != 2)
            gaps.append(gap)
        client.drop_context("inn")
    samples = {"longest wait in the stream": gaps, "prefill of the suffix": prefills}
    book.add("a worker dies in a stream", samples, {name: {} for name in samples})
    checks = [Check(what="streams whose worker was killed are whole, and were given by another", n=len(gaps), failed=wrong)]
    return checks, {"worker_recovery_most_s": max(gaps)}


def _kill_busy(pool: Supervisor, client: Client) -> None:
    """SIGKILL for the worker that holds a job."""
    for worker in client.stats().fleet:
        if worker.busy:
            os.kill(worker.pid, signal.SIGKILL)
            return
    raise RuntimeError("nobody is busy")


def measure_broker_deaths(pool: Supervisor, args: Any, book: Book) -> tuple[list[Check], dict[str, Any]]:
    answers: list[float] = []
    found: list[float] = []
    lost = 0
    words = CONTEXT_TEXT.split()
    with Client(pool.config.address, timeout=None, connect_timeout=GRACE_S) as client:
        for i in range(args.contexts):
            client.create_context(f"Evening {i}. " + " ".join(words[i % 100 : i % 100 + 60]), name=f"evening {i}")
    for _ in range(QUICK_DEATHS if args.quick else DEATHS):
        before = pool.pids["broker"]
        os.kill(before, signal.SIGKILL)
        start = time.perf_counter()
        with Client(pool.config.address, timeout=None, connect_timeout=GRACE_S) as client:
            client.info()
            answers.append(time.perf_counter() - start)
            lost += args.contexts - len(client.contexts())  # asked early, it is answered when they are back
            found.append(time.perf_counter() - start)
            until(lambda c=client: c.stats().workers == pool.config.workers)  # type: ignore[misc]
            lost += client.generate(SUFFIX, context="evening 0", max_tokens=1).usage.reused == 0
        time.sleep(10.5 if not args.quick else 0.0)  # so that the next one is no early death, after which the pause grows
    samples = {"until it answers": answers, "until all contexts are found": found}
    book.add(f"the broker dies, {args.contexts} contexts", samples, {name: {} for name in samples})
    checks = [Check(what="every context was there again", n=len(found) * args.contexts, failed=lost)]
    return checks, {"broker_restart_most_s": max(found)}


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, default=2, help="worker processes, at least 2; default 2")
    parser.add_argument("--clients", type=int, default=8, help="clients that generate at a time; default 8")
    parser.add_argument("--contexts", type=int, default=100, help="contexts that a broker's restart has to find; default 100")
    args = parser.parse_args(argv)
    if args.workers < 2 or args.clients < args.workers or args.contexts < 1:
        parser.error("at least two workers, as many clients, and one context are needed")
    observe.set_up("bench", log_level="error")
    started, machine = time.time(), machine_facts()
    model, cache = fetched_model(args.model, args.cache_dir)
    book = Book()
    checks: list[Check] = []
    facts: dict[str, Any] = {}
    with running(model, cache, workers=args.workers, threads=args.threads, tier=args.tier, log_level="error") as pool:
        for part in (measure_health, measure_worker_deaths, measure_broker_deaths):
            more, figures = part(pool, args, book)
            checks += more
            facts |= figures
    facts["target"] = "health_p99_ms <= 50, worker_recovery_most_s <= 2 + prefill, broker_restart_most_s <= 3"
    return finish(
        args, f"health-{model.stem.lower()}-w{args.workers}t{args.threads}", started, machine, book,
        subject={"model": model.name}, settings={"workers": args.workers, "threads": args.threads, "clients": args.clients},
        checks=checks, facts=facts,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run(main))

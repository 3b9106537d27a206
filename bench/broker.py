"""What the broker costs: processor time of a request, the round trip on an idle pool, requests a second.

    python -m bench.broker [--quick] [--contexts 1000] [--log FILE]

The pool is whole, but for the engine: its worker answers at once (bench/empty.py). The broker does all it ever does: it tokenises
real text, looks contexts up among a thousand, reserves, assigns, remembers answers, tells stories, writes its log, and is asked
for metrics each second. Beside the round trip stands that of a bare echo through three processes (bench/relay.py), in turns.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from bench import relay
from bench.harness import (
    ROOT,
    Book,
    Check,
    Clock,
    Spread,
    Turn,
    arguments,
    fetched_model,
    finish,
    interleave,
    machine_facts,
    run,
    show_progress,
)
from bench.pools import running
from geist_pool import observe
from geist_pool.client import Client
from geist_pool.demo.world import CONTEXT_TEXT, QUESTIONS, Choose, Say
from geist_pool.protocol import Generate, GenerateResult, Reply, Score, ScoreResult, encode
from geist_pool.supervisor import Programs

REPEATS, QUICK_REPEATS = 15, 3
SINGLE, QUICK_SINGLE = 200, 50  # round trips of a round
MANY, QUICK_MANY = 4000, 1000  # requests of a round that are not waited for one by one
WINDOW = 64  # of them in flight
CONNECTIONS = 8
MEMORY = 1 << 40  # nothing is put there, and all contexts shall stay
POOL, PROCESSOR, ECHO = "pool", "pool, broker's processor", "echo"

replies = msgspec.msgpack.Decoder(Reply)


def process_seconds(pid: int) -> float:
    """Processor time of all threads of a process since its start (Linux: clockid_t of a process is its id's complement)."""
    return time.clock_gettime((~pid << 3) | 2)


def context_text(i: int) -> str:
    """The i-th of many contexts: about 40 tokens of the demo's prose, none like another."""
    words = CONTEXT_TEXT.split()
    at = 17 * i % (len(words) - 30)
    return f"Evening {i} at the inn. " + " ".join(words[at : at + 30])


def requests(n_contexts: int, kind: type[Say | Choose]) -> Iterator[bytes]:
    """Bodies without end: each the demo's next question of that kind, to the next context by name."""
    questions = [q for q in QUESTIONS if isinstance(q, kind)]
    for i in itertools.count():
        question = questions[i % len(questions)]
        name = f"evening {7 * i % n_contexts}"
        if isinstance(question, Say):
            yield encode(Generate(text=question.suffix, context=name, max_tokens=1))
        else:
            yield encode(Score(text=question.suffix, context=name, labels=question.labels))


class Asker:
    """Puts ready-made requests to the pool, one by one or many at a time, and looks at every reply."""

    def __init__(self, address: str, broker: int, n_contexts: int) -> None:
        self.asked = self.wrong = 0
        self._broker = broker
        self._bodies = {kind: requests(n_contexts, kind) for kind in (Say, Choose)}
        self._stack = ExitStack()
        context = self._stack.enter_context(relay.linger_free())
        self._sockets = [self._stack.enter_context(context.socket(zmq.DEALER)) for _ in range(CONNECTIONS)]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            socket.connect(address)
            self._poller.register(socket, zmq.POLLIN)

    def close(self) -> None:
        self._stack.close()

    def one_by_one(self, n: int, kind: type[Say | Choose]) -> list[float]:
        """Seconds of each round trip."""
        out: list[float] = []
        socket = self._sockets[0]
        for _ in range(n):
            frames = self._frames(kind)
            start = time.perf_counter()
            frames = relay.round_trip(socket, frames)
            out.append(time.perf_counter() - start)
            self._check(frames)
        return out

    def many(self, n: int, kind: type[Say | Choose]) -> None:
        """`n` requests, WINDOW of them in flight, over all connections in turn."""
        left, pending = n, 0
        turn = itertools.cycle(self._sockets)
        while left and pending < WINDOW:
            next(turn).send_multipart(self._frames(kind))
            left, pending = left - 1, pending + 1
        while pending:
            ready = self._poller.poll(relay.ROUND_TRIP_MS)
            if not ready:
                raise TimeoutError(f"{pending} requests are not answered")
            for socket, _ in ready:
                while True:
                    try:
                        frames = socket.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    self._check(frames)
                    pending -= 1
                    if left:
                        socket.send_multipart(self._frames(kind))
                        left, pending = left - 1, pending + 1

    def processor_seconds(self) -> float:
        return process_seconds(self._broker)

    def _frames(self, kind: type[Say | Choose]) -> list[bytes]:
        self.asked += 1
        return [b"GP1", b"r%d" % self.asked, next(self._bodies[kind])]

    def _check(self, frames: list[bytes]) -> None:
        reply = replies.decode(frames[2])
        result = reply.result
        right = (isinstance(result, GenerateResult) and len(result.tokens) == 1) or (
            isinstance(result, ScoreResult) and len(result.labels) == 4
        )
        if not right or not isinstance(result, GenerateResult | ScoreResult) or result.context is None or not result.usage.reused:
            self.wrong += 1


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """What this process's children say goes to a file while the block runs."""
    kept = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def scraped(address: str) -> Iterator[list[int]]:
    """Somebody reads the metrics each second; how many bytes they were."""
    seen: list[int] = []
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(1.0):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
                seen.append(len(page.read()))

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def measure(asker: Asker, echo: zmq.Socket[bytes], args: Any, book: Book) -> dict[str, Any]:
    single, many = (QUICK_SINGLE, QUICK_MANY) if args.quick else (SINGLE, MANY)
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    body = next(requests(1, Say))

    def echoed(clock: Clock) -> None:
        clock.taken[ECHO] = Spread.of(_timed(lambda: relay.round_trip(echo, [b"GP1", b"r", body])) for _ in range(single)).median

    def one(clock: Clock) -> None:
        before = asker.processor_seconds()
        clock.taken[POOL] = Spread.of(asker.one_by_one(single, Say)).median
        clock.taken[PROCESSOR] = (asker.processor_seconds() - before) / single

    def at_once(kind: type[Say | Choose], wall: str, processor: str) -> Turn:
        def turn(clock: Clock) -> None:
            before = asker.processor_seconds()
            clock.taken[wall] = _timed(lambda: asker.many(many, kind)) / many
            clock.taken[processor] = (asker.processor_seconds() - before) / many

        return turn

    alone = f"one generate at a time, median of {single}"
    samples = interleave([echoed, one], repeats, progress=show_progress(alone))
    book.add(alone, samples, {ECHO: {}, POOL: {"requests": 1}, PROCESSOR: {"requests": 1}})
    book.ratio(alone, POOL, ECHO)
    group = f"{WINDOW} at a time, each of {many}"
    sides = {
        kind: (f"{name}, time", f"{name}, broker's processor") for kind, name in ((Say, "generate"), (Choose, "score 4 labels"))
    }
    samples = interleave([at_once(kind, *names) for kind, names in sides.items()], repeats, progress=show_progress(group))
    book.add(group, samples, {name: {"requests": 1} for names in sides.values() for name in names})
    rows = [book.row(alone, name).samples for name in (POOL, ECHO)]
    wall, processor = sides[Say]
    return {
        "cpu_us_per_request": 1e6 * book.row(group, processor).seconds.median,
        "cpu_us_per_request_alone": 1e6 * book.row(alone, PROCESSOR).seconds.median,
        "cpu_us_per_score": 1e6 * book.row(group, sides[Choose][1]).seconds.median,
        "round_trip_over_echo_us": 1e6 * Spread.of(p - e for p, e in zip(*rows, strict=True)).median,
        "requests_per_second": 1 / book.row(group, wall).seconds.median,
    }


def _timed(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--contexts", type=int, default=1000, help="contexts in the directory; default 1000")
    parser.add_argument("--log", type=Path, help="keep the pool's log here")
    args = parser.parse_args(argv)
    if args.contexts < 1:
        parser.error("at least one context is needed")
    started, machine = time.time(), machine_facts()
    model, cache = fetched_model(args.model, args.cache_dir)
    book = Book()
    with ExitStack() as stack:
        log = args.log or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        stack.enter_context(stderr_to(log))
        observe.set_up("bench", log_format="json")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # for bench.empty
        pool = stack.enter_context(
            running(
                model,
                cache,
                programs=Programs(worker="bench.empty"),
                workers=1,
                slots=WINDOW,
                memory=MEMORY,
                metrics="127.0.0.1:0",
                log_format="json",
                log_level="info",
                pin_cores=False,
            )
        )
        with Client(pool.config.address) as client:
            for i in range(args.contexts):
                client.create_context(context_text(i), name=f"evening {i}")
            n_contexts = client.stats().contexts
        asker = Asker(pool.config.address, pool.pids["broker"], args.contexts)
        stack.callback(asker.close)
        assert pool.metrics_address is not None
        pages = stack.enter_context(scraped(pool.metrics_address))
        facts = measure(asker, stack.enter_context(relay.running()), args, book)
        with Client(pool.config.address) as client:
            stats = client.stats()
        log_bytes = log.stat().st_size
    checks = [
        Check(what="answers are whole, of the context asked for, and reuse it", n=asker.asked, failed=asker.wrong),
        Check(what=f"all {args.contexts} contexts are in the directory", n=1, failed=int(n_contexts != args.contexts)),
        Check(what="the broker is the one that was started, and counted every request", n=1,
              failed=int(stats.requests.get("generate", 0) + stats.requests.get("score", 0) != asker.asked)),
        Check(what="the metrics were read", n=1, failed=int(not pages)),
    ]  # fmt: skip
    facts |= {"metrics_bytes": max(pages, default=0), "log_bytes": log_bytes}
    facts |= {"target": "cpu_us_per_request <= 200, round_trip_over_echo_us <= 300, requests_per_second >= 4000"}
    return finish(
        args, f"broker-{model.stem.lower()}", started, machine, book,
        subject={"tokenizer": model.name, "contexts": n_contexts, "engine": "empty"},
        settings={"in_flight": WINDOW, "connections": CONNECTIONS, "logs": "json, info", "metrics": "read each second"},
        checks=checks, facts=facts,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run(main))

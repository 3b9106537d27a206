"""How long a pool takes from its start to its first answer.

    python -m bench.load [--model PATH.gguf] [--workers N] [--threads N] [--repeats N] [--quick]

Each round starts the server as a person does, as a new interpreter, asks for one token behind a short text as soon as its socket
is there, and stops it. The model was packed before and lies in the page cache, as do the programs: what is measured is the pool's
own work and not the disk. The times of what happens on the way are those in the pool's log; they count from the start, too.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.harness import (
    BenchError,
    Book,
    Check,
    Clock,
    arguments,
    fetched_model,
    finish,
    interleave,
    machine_facts,
    run,
    show_progress,
)
from bench.pools import effective_tier
from geist_pool import config, observe
from geist_pool.client import Client
from geist_pool.engine import Engine, Model

COMMAND: Final = (sys.executable, "-P", "-c", "from geist_pool.cli import main; main()")
PROMPT: Final = "The door of the inn opens, and"
GROUP: Final = "from the start until"
FIRST: Final = "the first answer"
# Of the log's events: which process tells it, and what it means here, in the order of a start.
EVENTS: Final[Mapping[tuple[str, str], str]] = {
    ("pool", "started"): "the broker is started",
    ("pool", "model ready"): "the weights are compared with their checksum",
    ("broker", "listening"): "the broker takes requests",
    ("worker", "is ready"): "a worker has the model",
}
REPEATS, QUICK_REPEATS = 15, 3
GRACE_S: Final = 120.0


def moments(lines: Iterable[bytes], began: float) -> dict[str, float]:
    """Seconds from `began` (Unix time) to the first of each of EVENTS in a log of JSON lines; other lines are passed over."""
    found: dict[str, float] = {}
    for line in lines:
        try:
            said = msgspec.json.decode(line)
            process = said.get("process", "worker")
            at = said["time"] if "time" in said else datetime.fromisoformat(said["timestamp"]).timestamp()
            event = str(said["event"])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
            continue
        for (who, words), name in EVENTS.items():
            if who == process and words in event:
                found.setdefault(name, at - began)
    return found


class Start:
    """Starts of one model's pool; `answers` are the tokens of each, `packed` how often weights had to be packed."""

    def __init__(self, args: Any, model: Path, cache: Path) -> None:
        name = f"bench-load-{os.getpid()}"
        self._address = config.complete(config.PoolConfig(name=name), config.read_environment()).address
        self._socket = Path(self._address.removeprefix("ipc://"))
        options = {
            "--model": model, "--cache-dir": cache, "--name": name, "--workers": args.workers, "--threads": args.threads,
            "--tier": args.tier, "--log-format": "json", "--log-level": "info",
        }  # fmt: skip
        self._command = [*COMMAND, *(str(word) for pair in options.items() for word in pair)]
        self.answers: list[tuple[int, ...]] = []
        self.packed = 0
        self.cpu_s: list[float] = []  # of all processes of a pool, until it has ended

    def turn(self, clock: Clock) -> None:
        used = _children_cpu_s()
        began, start = time.time(), time.perf_counter()
        with subprocess.Popen(self._command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as pool:
            try:
                self._await_socket(pool, start)
                with Client(self._address, timeout=GRACE_S, connect_timeout=GRACE_S) as client:
                    given = client.generate(PROMPT, max_tokens=1)
                clock.taken[FIRST] = time.perf_counter() - start
                until = time.perf_counter() + GRACE_S
                with Client(self._address, timeout=GRACE_S) as client:  # so that no round ends another way than the others
                    while client.info().workers < int(self._command[self._command.index("--workers") + 1]):
                        if time.perf_counter() > until:
                            raise BenchError("not all workers came")
                        time.sleep(0.01)
            finally:
                pool.send_signal(signal.SIGTERM)
                _, log = pool.communicate(timeout=GRACE_S)
        lines = log.splitlines()
        found = moments(lines, began)
        if found.keys() != set(EVENTS.values()):
            raise BenchError(f"the pool's log tells only of {sorted(found)}")
        clock.taken.update(found)
        self.cpu_s.append(_children_cpu_s() - used)
        self.answers.append(given.tokens)
        self.packed += any(b"packing" in line or b"made anew" in line for line in lines)

    def _await_socket(self, pool: subprocess.Popen[bytes], start: float) -> None:
        while not self._socket.exists():
            if pool.poll() is not None or time.perf_counter() - start > GRACE_S:
                raise BenchError("the pool did not start; its log says why" if pool.poll() is not None else "no socket appeared")
            time.sleep(0.001)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def warm(model: Path, cache: Path, tier: str) -> str:
    """Packs the weights if need be and reads both files once, so that they are in memory. Returns the fingerprint."""
    with Engine(tier, os.cpu_count() or 1) as engine, Model(engine, model, cache_dir=cache, check=True) as loaded:
        with model.open("rb") as file:
            while file.read(1 << 24):
                pass
        return loaded.fingerprint


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, default=1, help="worker processes; default 1")
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error("at least one worker is needed")
    observe.set_up("bench", log_level="warning")
    started, machine = time.time(), machine_facts()
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    model, cache = fetched_model(args.model, args.cache_dir)
    fingerprint = warm(model, cache, args.tier)
    starts = Start(args, model, cache)
    samples = interleave([starts.turn], repeats, progress=show_progress("load"))
    book = Book()
    book.add(GROUP, samples, {name: {} for name in (*EVENTS.values(), FIRST)})
    checks = [
        Check(what="every start gave the same first answer", n=len(starts.answers), failed=len(set(starts.answers)) - 1),
        Check(what="no start had to pack the weights", n=len(starts.answers), failed=starts.packed),
    ]
    facts = {
        "first_answer_ms": 1e3 * book.row(GROUP, FIRST).seconds.median,
        "cpu_ms_of_a_start_and_stop": 1e3 * sorted(starts.cpu_s)[len(starts.cpu_s) // 2],
        "model_bytes": model.stat().st_size,
        "target": "first_answer_ms < 1000",
    }
    subject = {"model": model.name, "fingerprint": fingerprint[:16]}
    settings = {"tier": effective_tier(args.tier), "workers": args.workers, "threads": args.threads, "repeats": repeats}
    bench = f"load-{model.stem.lower()}-w{args.workers}t{args.threads}"
    return finish(args, bench, started, machine, book, subject=subject, settings=settings, checks=checks, facts=facts)


if __name__ == "__main__":
    sys.exit(run(main))

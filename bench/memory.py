"""What memory a pool's processes take, and what another worker costs.

    python -m bench.memory [--model PATH.gguf] [--workers N] [--threads N] [--quick]

A pool is started with one worker, with two, and so on up to --workers (3). Every worker answers a few questions behind a prompt,
so that its session has been used and is idle then; after that the kernel says what each process has (/proc/PID/smaps_rollup):

* private dirty: pages of its own that hold something no file holds. This is what another worker costs.
* private clean: pages of files that nobody else maps at the moment, such as the weights of an only worker. They go when memory
  is short, and two workers share them.
* shared: pages that other processes map as well. pss: its private pages and its share of those.

The supervisor is this process and is left out.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from bench.harness import BenchError, Book, Check, arguments, fetched_model, finish, machine_facts, run
from bench.pools import effective_tier, running
from geist_pool import observe
from geist_pool.client import Client
from geist_pool.demo.world import CONTEXT_TEXT

GROUP: Final = "from the start until every worker is ready"
TEMPLATES: Final = "templates"  # the process that renders chat templates, the broker's child
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "private_dirty": ("Private_Dirty",),
    "private_clean": ("Private_Clean",),
    "shared": ("Shared_Clean", "Shared_Dirty"),
    "pss": ("Pss",),
}
TARGET_MB: Final = 64
ROUNDS, QUICK_ROUNDS = 5, 1
TOKENS: Final = 16
SETTLE_S: Final = 0.5

Taken = dict[str, float]
"""MB (2**20 bytes) by FIELDS."""


def taken(rollup: str) -> Taken:
    """The figures in the text of a smaps_rollup. Raises BenchError if one is missing."""
    found = {name: int(kb) for name, kb in re.findall(r"^(\w+):\s+(\d+) kB$", rollup, re.MULTILINE)}
    try:
        return {field: sum(found[part] for part in parts) / 1024 for field, parts in FIELDS.items()}
    except KeyError as missing:
        raise BenchError(f"the kernel tells no {missing} of a process") from None


def of_pool(pids: Mapping[str, int]) -> dict[str, Taken]:
    """By role: the broker, its process for templates if there is one, w0, w1, ..."""
    roles = dict(pids)
    children = Path(f"/proc/{pids['broker']}/task/{pids['broker']}/children").read_text().split()
    roles |= {TEMPLATES if i == 0 else f"{TEMPLATES}{i}": int(pid) for i, pid in enumerate(children)}
    return {role: taken(Path(f"/proc/{pid}/smaps_rollup").read_text()) for role, pid in roles.items()}


def another_worker(with_n: Mapping[int, Mapping[str, Taken]]) -> float:
    """MB of private dirty memory that a pool has more for each worker beyond the first, all its processes together."""
    least, most = min(with_n), max(with_n)
    total = {n: sum(figures["private_dirty"] for figures in with_n[n].values()) for n in (least, most)}
    return (total[most] - total[least]) / (most - least)


def use_every_worker(address: str, workers: int, rounds: int) -> int:
    """Questions, as many at a time as there are workers. Returns how many answers there were."""

    def ask(i: int) -> int:
        with Client(address, timeout=None) as client:
            return len(client.generate(f"{i}. {CONTEXT_TEXT}", max_tokens=TOKENS).tokens)

    with ThreadPoolExecutor(workers) as clients:
        return sum(n > 0 for n in clients.map(ask, range(rounds * workers)))


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--workers", type=int, default=3, help="the most worker processes, at least 2; default 3")
    args = parser.parse_args(argv)
    if args.workers < 2:
        parser.error("at least two workers are needed: the question is what another one costs")
    observe.set_up("bench", log_level="warning")
    started, machine = time.time(), machine_facts()
    rounds = args.repeats or (QUICK_ROUNDS if args.quick else ROUNDS)
    model, cache = fetched_model(args.model, args.cache_dir)
    with_n: dict[int, dict[str, Taken]] = {}
    seconds: dict[str, list[float]] = {}
    asked = answered = 0
    for n in range(1, args.workers + 1):
        began = time.perf_counter()
        with running(model, cache, workers=n, threads=args.threads, tier=args.tier) as pool:
            seconds[f"{n} worker{'s' if n > 1 else ''}"] = [time.perf_counter() - began]
            answered += use_every_worker(pool.config.address, n, rounds)
            asked += rounds * n
            time.sleep(SETTLE_S)
            with_n[n] = of_pool(pool.pids)
    book = Book()
    book.add(GROUP, seconds, {name: {} for name in seconds})
    further = [f["private_dirty"] for n, roles in with_n.items() for role, f in roles.items() if role[0] == "w" and role != "w0"]
    facts: dict[str, Any] = {
        f"{role}_mb_with_{n}": ", ".join(f"{field} {mb:.1f}" for field, mb in figures.items())
        for n, roles in with_n.items()
        for role, figures in roles.items()
    }
    facts |= {
        "private_dirty_mb_of_another_worker": another_worker(with_n),
        "private_dirty_mb_of_a_worker_most": max(further),
        "target": f"private_dirty_mb_of_another_worker <= {TARGET_MB}",
    }
    checks = [Check(what="every question was answered", n=asked, failed=asked - answered)]
    settings = {"tier": effective_tier(args.tier), "workers": args.workers, "threads": args.threads, "rounds": rounds}
    bench = f"memory-{model.stem.lower()}-w{args.workers}t{args.threads}"
    return finish(
        args, bench, started, machine, book, subject={"model": model.name}, settings=settings, checks=checks, facts=facts
    )


if __name__ == "__main__":
    sys.exit(run(main))

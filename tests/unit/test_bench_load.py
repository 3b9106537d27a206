"""Properties of the measurements of a start and of memory: a log gives the first time of each event and nothing for lines that
tell none; the kernel's figures are read by name, and a missing one is an error; another worker costs what all processes together
have more. Tolerance: none; figures are made up. Nothing is started.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
try:
    harness: Any = importlib.import_module("bench.harness")
    load: Any = importlib.import_module("bench.load")
    memory: Any = importlib.import_module("bench.memory")
finally:
    sys.path.remove(str(ROOT))

ROLLUP = """5581c-7ffe [rollup]
Rss:              100000 kB
Pss:               2048 kB
Shared_Clean:      3072 kB
Shared_Dirty:      1024 kB
Private_Clean:      512 kB
Private_Dirty:     1536 kB
"""


def test_moments_are_the_first_of_each_event() -> None:
    log = [
        b'{"process":"pool","event":"started","child":"broker","timestamp":"2026-01-02T00:00:00.250000Z"}',
        b'{"process":"pool","event":"started","child":"w0","timestamp":"2026-01-02T00:00:00.500000Z"}',
        b'{"process":"broker","event":"started anew","timestamp":"2026-01-02T00:00:00.600000Z"}',
        b'{"time":1767312000.75,"worker":"w0.0","event":"w0.0 is ready: llama, tier avx2"}',
        b"Traceback (most recent call last):",
        b"7",
        b'{"process":"broker","timestamp":"2026-01-02T00:00:00.700000Z"}',
        b'{"process":"broker","event":"listening","timestamp":"tomorrow"}',
    ]
    found = load.moments(log, 1767312000.0)
    assert found == {
        "the broker is started": pytest.approx(0.25),
        "a worker has the model": pytest.approx(0.75),
    }
    assert set(found) < set(load.EVENTS.values())


def test_figures_of_a_process() -> None:
    assert memory.taken(ROLLUP) == {"private_dirty": 1.5, "private_clean": 0.5, "shared": 4.0, "pss": 2.0}
    with pytest.raises(harness.BenchError, match="Private_Dirty"):
        memory.taken(ROLLUP.replace("Private_Dirty", "Private_Other"))


def test_another_worker_is_the_difference_of_whole_pools() -> None:
    def pool(broker: float, *workers: float) -> dict[str, dict[str, float]]:
        figures = {"broker": broker} | {f"w{i}": mb for i, mb in enumerate(workers)}
        return {role: {"private_dirty": mb} for role, mb in figures.items()}

    assert memory.another_worker({1: pool(100, 50), 2: pool(101, 50, 45), 3: pool(104, 50, 45, 47)}) == 48

"""What this machine could do at most, measured by loops of C (bench/native/limits.h) in the run of what is held against it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from bench.harness import ROOT, BenchError

NATIVE: Final = ROOT / "bench" / "native"
FLAGS: Final = ("-O3", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra")
PEAK_S: Final = 0.15
PIECE: Final = 4096  # of memory, in which work is divided


class BuildError(BenchError):
    """A file of bench/native does not compile here."""


def compiled(arguments: list[str]) -> None:
    """Runs a compiler or CMake. Raises BuildError with its last lines."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # CMake may be a package
    program = shutil.which(arguments[0], path=beside) or arguments[0]
    try:
        done = subprocess.run([program, *arguments[1:]], capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{arguments[0]} does not run: {error.strerror}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(arguments)}: {(done.stdout + done.stderr)[-2000:]}")


def compiler() -> str:
    return os.environ.get("CC", "cc")


class Limits:
    """The loops, compiled into a temporary folder that goes with it. One thread at a time asks."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._lib: Any = None

    def __enter__(self) -> Limits:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            shared = folder / "limits.so"
            compiled([compiler(), *FLAGS, "-shared", "-fPIC", "-o", str(shared), str(NATIVE / "limits.c")])
            self._lib = ctypes.CDLL(str(shared))
            self._pool = stack.enter_context(ThreadPoolExecutor())  # threads that are there already cost a read nothing
            self._stack = stack.pop_all()
        for name in ("bench_vpdpbusd", "bench_fma"):
            getattr(self._lib, name).restype = ctypes.c_double
            getattr(self._lib, name).argtypes = [ctypes.c_double]
        self._lib.bench_read_ways.restype = ctypes.c_uint
        self._lib.bench_read.restype = ctypes.c_uint64
        self._lib.bench_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def vpdpbusd(self, threads: int, seconds: float = PEAK_S) -> float:
        """Multiply-adds a second of so many threads at a time, each with nothing but vpdpbusd; 0 where the machine has none."""
        with ThreadPoolExecutor(threads) as pool:  # ctypes gives the interpreter's lock away
            return float(sum(pool.map(self._lib.bench_vpdpbusd, [seconds] * threads)))

    def reading(self, view: memoryview, threads: int) -> Reading:
        """How this memory is read fastest, found by trying every way twice."""
        ways = range(self._lib.bench_read_ways())
        taken = {way: [_seconds(self.reading_by(way, view, threads)) for _ in range(2)] for way in ways}
        return self.reading_by(min(ways, key=lambda way: min(taken[way])), view, threads)

    def reading_by(self, way: int, view: memoryview, threads: int) -> Reading:
        """One way of `bench_read_ways`."""
        return Reading(self._lib, self._pool, view, threads, way)


class Reading:
    """A call reads all of a memory once, by threads that share it, and leaves the sum in `sum`."""

    def __init__(self, lib: Any, pool: ThreadPoolExecutor, view: memoryview, threads: int, way: int) -> None:
        self.n_bytes = len(view) // (PIECE * threads) * PIECE * threads
        self.way = way
        self.sum = 0
        self._lib = lib
        self._pool = pool
        self._start = _address(view)
        self._threads = threads

    def __call__(self) -> None:
        each = self.n_bytes // self._threads
        starts = [self._start + i * each for i in range(self._threads)]
        others = [self._pool.submit(self._lib.bench_read, start, each, self.way) for start in starts[1:]]
        own = self._lib.bench_read(starts[0], each, self.way)
        self.sum = (own + sum(other.result() for other in others)) % 2**64


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _address(view: memoryview) -> int:
    """Where a read-only buffer lies; ctypes itself takes only writable ones."""
    import numpy as np

    return int(np.frombuffer(view, np.uint8).ctypes.data)

"""Which cores this process may use, and which worker gets which of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

CPU_DIR: Final = Path("/sys/devices/system/cpu")


class Cores(Struct, frozen=True):
    """What there is to compute on.

    cores: the logical CPUs of each physical core that this process may use, cores of one complex (a shared last-level cache) one
        behind the other.
    quota: CPUs' worth of time that the control group allows; None where it sets no limit.
    """

    cores: tuple[tuple[int, ...], ...]
    quota: float | None = None

    @property
    def usable(self) -> int:
        """How many threads can compute at full speed at a time; at least 1."""
        n = len(self.cores)
        return max(1, n if self.quota is None else min(n, int(self.quota)))


def find_cores() -> Cores:
    """The cores of this process's affinity mask, and its control group's quota."""
    allowed = sorted(os.sched_getaffinity(0))
    groups: dict[tuple[int, ...], list[int]] = {}
    for cpu in allowed:
        siblings = _cpu_list(CPU_DIR / f"cpu{cpu}" / "topology" / "thread_siblings_list") or (cpu,)
        complex_ = _cpu_list(CPU_DIR / f"cpu{cpu}" / "cache" / "index3" / "shared_cpu_list") or (0,)
        groups.setdefault((complex_[0], siblings[0]), []).append(cpu)
    return Cores(tuple(tuple(groups[key]) for key in sorted(groups)), read_quota())


def assign(cores: Cores, n_workers: int, threads: int) -> list[tuple[int, ...]] | None:
    """Whole cores for each worker, one a thread, in the order of `cores`; None, i.e. no pinning, where they do not suffice."""
    if n_workers * threads > cores.usable:
        return None
    taken = [cores.cores[w * threads : (w + 1) * threads] for w in range(n_workers)]
    return [tuple(cpu for core in mine for cpu in core) for mine in taken]


def default_workers(cores: Cores, threads: int) -> int:
    """As many workers as the cores take with `threads` each; at least one."""
    return max(1, cores.usable // threads)


def read_quota(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The tightest CPU quota of this process's control group and those above it, in CPUs; None without one."""
    found: list[float] = []
    for line in _read(proc).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found += _walk(root, path, lambda at: _ratio(_read(at / "cpu.max").split()))
        elif "cpu" in controllers.split(","):
            for base in (root / controllers, root / "cpu"):
                found += _walk(base, path, _old_quota)
    return min(found, default=None)


def _walk(base: Path, path: str, quota: Callable[[Path], float | None]) -> list[float]:
    """The quotas from the group itself up to the root of its tree."""
    at = base / path.lstrip("/")
    levels = [at, *at.parents]
    values = [quota(level) for level in levels if level == base or base in level.parents]
    return [v for v in values if v is not None]


def _old_quota(at: Path) -> float | None:
    """Of a version 1 group."""
    return _ratio([_read(at / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")])


def _ratio(words: Sequence[str]) -> float | None:
    if len(words) != 2 or not all(w.isdigit() for w in words) or int(words[1]) == 0:
        return None  # "max", -1, or no such file
    return int(words[0]) / int(words[1])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cpu_list(path: Path) -> tuple[int, ...]:
    """A kernel list such as "0-3,8"."""
    out: list[int] = []
    for part in _read(path).strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            out += range(int(first), int(last or first) + 1)
    return tuple(out)

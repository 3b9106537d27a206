"""Interleaved repeats, what is said of them, and where it is kept.

Sides that are to be compared take turns: A B C, C B A, B C A, A C B, ... so that a machine that slows down, or another's work
beside ours, meets all of them alike, and no side always finds the caches as the same other one left them. A ratio is taken pair
by pair, between two samples of the same round, and its median and spread are those of the pairs. Nothing here knows what is
fast enough.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec
from msgspec import Struct

SCHEMA: Final = 1
ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench" / "results"
FLAGS: Final = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "asimd",
    "asimddp", "i8mm",
)  # fmt: skip
PACKAGES: Final = ("numpy", "cffi", "pyzmq", "msgspec", "posix-ipc", "tokenizers")


# ---- what is said of samples


class Spread(Struct, frozen=True, kw_only=True):
    """Order statistics of samples; quartiles interpolate linearly between the two nearest."""

    n: int
    min: float
    q1: float
    median: float
    q3: float
    max: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """Raises ValueError without samples."""
        s = sorted(samples)
        if not s:
            raise ValueError("no samples")
        return cls(n=len(s), min=s[0], q1=_quantile(s, 0.25), median=_quantile(s, 0.5), q3=_quantile(s, 0.75), max=s[-1])


def _quantile(s: Sequence[float], q: float) -> float:
    at = q * (len(s) - 1)
    low = int(at)
    if low + 1 == len(s):
        return s[low]
    return s[low] + (at - low) * (s[low + 1] - s[low])


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """over[i] / under[i]. Raises ValueError if they are not pairs, or if a divisor is not positive."""
    if len(over) != len(under):
        raise ValueError(f"{len(over)} samples over {len(under)} are no pairs")
    if any(u <= 0 for u in under):
        raise ValueError("a time is not positive")
    return [o / u for o, u in zip(over, under, strict=True)]


# ---- taking turns


class Clock:
    """Takes times by name: `with clock("prefill"): ...`. What stands outside the `with` is not measured."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}  # seconds, of the turn that runs
        self._name = ""
        self._start = 0

    def __call__(self, name: str) -> Clock:
        if name in self.taken:
            raise ValueError(f"{name!r} is timed twice in one turn")
        self._name = name
        return self

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.taken[self._name] = (time.perf_counter_ns() - self._start) * 1e-9


Turn = Callable[[Clock], None]
"""One side's work: prepares, times one or more parts by name, cleans up."""

Samples = dict[str, list[float]]
"""Seconds by name; the i-th sample of each name was taken in round i."""


def interleave(
    turns: Sequence[Turn], repeats: int, *, warmups: int = 1, progress: Callable[[int, int], None] | None = None
) -> Samples:
    """Runs all turns once a round in the order of `order`; `warmups` rounds before are not kept.

    The garbage collector runs between turns only. Raises ValueError if a name is not timed exactly once a round.
    """
    if repeats < 1 or not turns:
        raise ValueError("at least one turn and one repeat are needed")
    samples: Samples = {}
    was_enabled = gc.isenabled()
    try:
        for r in range(-warmups, repeats):
            taken: dict[str, float] = {}
            for i in order(r, len(turns)):
                gc.collect()
                gc.disable()
                clock = Clock()
                turns[i](clock)
                gc.enable()
                if twice := taken.keys() & clock.taken.keys():
                    raise ValueError(f"{', '.join(sorted(twice))} timed twice in one round")
                taken.update(clock.taken)
            if progress is not None:
                progress(r + 1, repeats)
            if r < 0:
                continue
            if samples and samples.keys() != taken.keys():
                raise ValueError(f"round {r} timed {sorted(taken)}, those before {sorted(samples)}")
            for name, seconds in taken.items():
                samples.setdefault(name, []).append(seconds)
    finally:
        (gc.enable if was_enabled else gc.disable)()
    return samples


def order(r: int, n: int) -> list[int]:
    """Which of `n` turns comes when in round `r`: forwards, backwards, and so on from the next one."""
    forward = [(r // 2 + i) % n for i in range(n)]
    return forward if r % 2 == 0 else forward[::-1]


# ---- what a result is


class Row(Struct, frozen=True, kw_only=True):
    """Times of one thing. stands_for: what was done in that time, as counts by unit: "bytes" moved, "state_bytes" made
    usable, "macs", "tokens"."""

    group: str
    name: str
    seconds: Spread
    samples: tuple[float, ...]
    stands_for: dict[str, int] = {}
    note: str = ""


class Ratio(Struct, frozen=True, kw_only=True):
    """How many times longer `over` took than `under`, pair by pair."""

    group: str
    over: str
    under: str
    pairs: Spread


class Check(Struct, frozen=True, kw_only=True):
    """Something that must hold for the times to mean anything; `failed` of `n` did not hold."""

    what: str
    n: int
    failed: int


class Report(Struct, frozen=True, kw_only=True):
    """One run, as it is written to disk. subject: what was measured; settings: how; facts: other figures, units named."""

    schema: int = SCHEMA
    bench: str
    started: str  # UTC, ISO 8601
    took_s: float
    quick: bool
    machine: dict[str, Any]
    subject: dict[str, Any]
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]
    checks: tuple[Check, ...] = ()
    facts: dict[str, Any] = {}

    @property
    def sound(self) -> bool:
        """Whether every check held."""
        return all(check.failed == 0 for check in self.checks)


class Book:
    """Rows and ratios in the making."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.ratios: list[Ratio] = []

    def add(self, group: str, samples: Mapping[str, Sequence[float]], stands_for: Mapping[str, Mapping[str, int]]) -> None:
        """One row for each name, in the order of `stands_for`, which must name all."""
        if samples.keys() != stands_for.keys():
            raise ValueError(f"timed {sorted(samples)}, described {sorted(stands_for)}")
        for name, work in stands_for.items():
            taken = tuple(samples[name])
            self.rows.append(Row(group=group, name=name, seconds=Spread.of(taken), samples=taken, stands_for=dict(work)))

    def row(self, group: str, name: str) -> Row:
        """A row that was added. Raises KeyError."""
        for row in self.rows:
            if (row.group, row.name) == (group, name):
                return row
        raise KeyError((group, name))

    def ratio(self, group: str, over: str, under: str) -> None:
        """Compares two rows of a group."""
        pairs = Spread.of(ratios(self.row(group, over).samples, self.row(group, under).samples))
        self.ratios.append(Ratio(group=group, over=over, under=under, pairs=pairs))


# ---- the machine


def machine_facts() -> dict[str, Any]:
    """What one must know of machine and build to believe a time. Unknown is None."""
    info = _read(Path("/proc/cpuinfo"))
    has = set(_field(info, "flags|Features").split())
    memory = re.search(r"MemTotal:\s+(\d+) kB", _read(Path("/proc/meminfo")))
    return {
        "cpu": cpu_name(info),
        "cores_online": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in FLAGS if flag in has],
        "hypervisor": "hypervisor" in has,
        "l2_bytes": _cache_bytes(2),
        "l3_bytes": _cache_bytes(3),
        "memory_bytes": int(memory[1]) * 1024 if memory else None,
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "compiler": extension_compiler(),
        "packages": {name: _version(name) for name in PACKAGES},
        "geist_pool": _own_version(),
        "commit": _commit(),
        "load_at_start": list(os.getloadavg()),
    }


def cpu_name(cpuinfo: str) -> str | None:
    """The processor's name in the text of /proc/cpuinfo; on ARM, where there is none, its part number."""
    name = _field(cpuinfo, "model name")
    if not name and (part := _field(cpuinfo, "CPU part")):
        name = f"ARM part {part}"
    return name or None


def host_kind(machine: Mapping[str, Any]) -> str:
    """A word for file names: the processor's name and the number of cores, e.g. "amd-epyc-2c"."""
    name = re.sub(r"\((r|tm)\)|@.*|\b(cpu|processor|with .*)\b", " ", (machine["cpu"] or "unknown").lower())
    return "-".join([*re.findall(r"[a-z0-9]+", name), f"{machine['cores_allowed']}c"])


def extension_compiler() -> str | None:
    """The compiler that built the engine, as it signed the extension module."""
    from geist_pool import _geist

    data = Path(_geist.__file__).read_bytes()
    found = {m.decode() for m in re.findall(rb"(?:GCC: \([ -~]*|clang version [ -~]*)", data)}
    return ", ".join(sorted(found)) or None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    found = re.search(rf"^(?:{name})\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _cache_bytes(level: int) -> int | None:
    size = _read(Path(f"/sys/devices/system/cpu/cpu0/cache/index{level}/size")).strip()
    found = re.fullmatch(r"(\d+)([KM])", size)
    return int(found[1]) << (10 if found[2] == "K" else 20) if found else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _own_version() -> str | None:
    found = re.search(r'^version = "([^"]+)"', _read(ROOT / "pyproject.toml"), re.MULTILINE)
    return found[1] if found else _version("geist-pool")


def _commit() -> str | None:
    try:
        shown = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return shown.stdout.strip() or None


# ---- writing and showing


def write(report: Report, directory: Path, kind: str) -> Path:
    """Writes BENCH-DATE-KIND.json; a later run of the same day on the same kind of machine takes its place."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{report.bench}-{report.started[:10]}-{kind}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(_rounded(msgspec.to_builtins(report))), indent=1) + b"\n")
    return path


def read(path: Path) -> Report:
    """Raises msgspec.DecodeError or ValidationError for what `write` did not write."""
    return msgspec.json.decode(path.read_bytes(), type=Report)


def _rounded(value: Any) -> Any:
    """Six significant digits are more than any time here is worth."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return value


def table(report: Report) -> str:
    """The report as plain text."""
    machine = report.machine
    quick = " (quick: too few repeats to quote)" if report.quick else ""
    lines = [
        f"{report.bench}, {report.started}, took {report.took_s:.0f} s{quick}",
        f"  {machine['cpu']}, {machine['cores_allowed']} cores ({' '.join(machine['flags'])}), {machine['kernel']}",
        f"  built by {machine['compiler']}, Python {machine['python']}, commit {machine['commit']}, "
        f"load {machine['load_at_start'][0]:.2f} at start, {machine['load_at_end'][0]:.2f} at end",
        "  " + ", ".join(f"{k} {v}" for k, v in report.subject.items()),
        "  " + ", ".join(f"{k} {v}" for k, v in report.settings.items()),
    ]
    groups = list(dict.fromkeys(row.group for row in report.rows))
    width = max(len(words) for row in report.rows for words in (row.name, row.group))
    for group in groups:
        lines += ["", f"{group:<{width + 2}}   median      min       q1       q3      max   stands for"]
        for row in (r for r in report.rows if r.group == group):
            s = row.seconds
            times = " ".join(f"{_time(t):>8}" for t in (s.median, s.min, s.q1, s.q3, s.max))
            lines.append(f"  {row.name:<{width}} {times}   {_work(row)}")
        found = [r for r in report.ratios if r.group == group]
        name_width = max((len(f"{r.over} / {r.under}") for r in found), default=0)
        for r in found:
            p = r.pairs
            name = f"{r.over} / {r.under}"
            lines.append(f"  {name:<{name_width}}  {_number(p.median)}x  ({_number(p.q1)} .. {_number(p.q3)}, {p.n} pairs)")
    if report.facts or report.checks:
        lines.append("")
    lines += [f"  {k}: {_number(v) if isinstance(v, float) else v}" for k, v in report.facts.items()]
    for check in report.checks:
        lines.append(f"  {'holds' if check.failed == 0 else f'FAILED {check.failed} times'}: {check.what} ({check.n} times)")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{_number(seconds * scale)}{unit}"
    return f"{seconds * 1e9:.0f}ns"


def _number(x: float) -> str:
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"


def _work(row: Row) -> str:
    """What the time stands for, and how fast that is at the median."""
    out = []
    for unit, n in row.stands_for.items():
        per_second = n / row.seconds.median
        if unit == "bytes":
            out.append(f"{n / 1e6:.2f} MB ({per_second / 1e9:.2f} GB/s)")
        elif unit == "state_bytes":
            out.append(f"{n / 1e6:.2f} MB of state")
        elif unit == "macs":
            out.append(f"{n / 1e9:.3g} GMAC ({per_second / 1e9:.3g} GMAC/s)")
        elif unit == "decisions":
            out.append(f"{n} decisions ({_number(per_second)}/s)")
        else:
            out.append(f"{n} {unit}")
    return ", ".join(out)


# ---- the command line that every bench has


MODEL_HELP: Final = "path of a GGUF, smollm2 or gemma3-270m, which are fetched once, or a name of `python -m bench.shapes --list`"


def arguments(about: str, *, models: Sequence[str] = (), threads: Sequence[int] = ()) -> argparse.ArgumentParser:
    """--model, --repeats, --quick, --threads, --tier, --out, --host-kind, --cache-dir, --no-write.

    With `models`, `--model` takes several (separated by commas, or repeated) and is a list, of these by default; so is
    `--threads` with `threads`.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if models:
        several = f"{MODEL_HELP}; several by commas or repetition; default: {','.join(models)}"
        parser.add_argument("--model", action=_Several, default=list(models), metavar="MODEL[,MODEL...]", help=several)
    else:
        parser.add_argument("--model", default="smollm2", help=f"{MODEL_HELP}; default: smollm2")
    parser.add_argument("--repeats", type=_positive, help="rounds that are kept")
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it works; not to be quoted")
    if threads:
        default = ",".join(map(str, threads))
        parser.add_argument("--threads", type=_positives, default=list(threads), help=f"numbers of threads; default {default}")
    else:
        parser.add_argument("--threads", type=_positive, default=1, help="threads of the engine (of each worker); default 1")
    parser.add_argument("--tier", default="auto", choices=("auto", "scalar", "avx2", "avx512"), help="instruction set")
    parser.add_argument("--cache-dir", help="models and packed weights; default: the user's cache")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"where the result goes; default {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--host-kind", help="the machine's name in the result's file name; default: from the processor's")
    parser.add_argument("--no-write", action="store_true", help="only print")
    return parser


def _positive(word: str) -> int:
    n = int(word)
    if n < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return n


def _positives(words: str) -> list[int]:
    return [_positive(word) for word in words.split(",")]


class _Several(argparse.Action):
    """Names separated by commas, or given one by one; the first takes the default's place."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        before = getattr(namespace, self.dest)
        given = [] if before is self.default else before
        setattr(namespace, self.dest, [*given, *(word for word in values.split(",") if word)])


def fetched_model(name_or_path: str, cache_dir: str | None) -> tuple[Path, Path]:
    """(path of the model, fetched or made if need be; cache directory)."""
    from bench import shapes
    from geist_pool import config, models

    cache = Path(config.load({"cache_dir": cache_dir} if cache_dir else {}).cache_dir)
    if shapes.is_shape(name_or_path):
        return shapes.shape_model(name_or_path, cache), cache
    if name_or_path in models.CATALOGUE:
        return models.pull(name_or_path, cache), cache
    return models.resolve(name_or_path, cache), cache


def finish(
    args: argparse.Namespace,
    bench: str,
    started: float,
    machine: dict[str, Any],
    book: Book,
    *,
    subject: Mapping[str, Any],
    settings: Mapping[str, Any],
    checks: Sequence[Check],
    facts: Mapping[str, Any],
) -> int:
    """Shows the run, keeps it, and gives the exit status: 1 if a check failed, which is then not kept. started: Unix seconds."""
    report = Report(
        bench=bench,
        started=datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        took_s=time.time() - started,
        quick=args.quick,
        machine=machine | {"load_at_end": list(os.getloadavg())},
        subject=dict(subject),
        settings=dict(settings),
        rows=tuple(book.rows),
        ratios=tuple(book.ratios),
        checks=tuple(checks),
        facts=dict(facts),
    )
    if not report.sound:
        print(table(report))
        print("a check failed: these times mean nothing and are not kept", file=sys.stderr)
        return 1
    path = None if args.no_write else write(report, args.out, args.host_kind or host_kind(machine))
    print(table(report) + (f"\nwritten: {path}" if path else ""))
    return 0


class BenchError(Exception):
    """Why a measurement cannot be made, in a sentence."""


def run(main: Callable[[], int]) -> int:
    """The bench's exit status; every expected error is one sentence on stderr."""
    from geist_pool.errors import GeistPoolError

    try:
        return main()
    except (GeistPoolError, BenchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was kept", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        return 1


def show_progress(what: str) -> Callable[[int, int], None]:
    """A line on stderr that tells the round, if that is a terminal."""

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            words = f"{what}: round {max(done, 0)} of {total}" if done < total else ""
            print(f"\r\033[K{words}", end="", file=sys.stderr, flush=True)

    return progress

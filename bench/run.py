"""All benchmarks, one after the other, each in a process of its own; which of them ran is kept beside their results.

    python -m bench.run [--quick] [--only decision,attach] [--model NAME] [--peer-python PATH] [--llama-server PATH]

What a bench prints is shown as it comes. One that fails, or takes longer than its limit, is ended and named, and the others still
run; the exit status is then 1. Peers that are not there are left out by the benches, each with a word.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from bench.harness import RESULTS, ROOT, host_kind, machine_facts, run

STOP_S: Final = 15.0  # from the polite signal to SIGKILL
WORDS_LINES: Final = 3  # of the end of its output, kept of a bench that failed
WRITTEN: Final = re.compile(r"written: (.+)")


class Bench(NamedTuple):
    """A module of this package. limit_s, quick_limit_s: seconds after which it is ended. options: of its own. peers: which of the
    options that name a peer it takes. cores: how many it needs."""

    name: str
    limit_s: float
    quick_limit_s: float
    options: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    cores: int = 1

    @property
    def label(self) -> str:
        return " ".join([self.name, *self.options])


PEER, SERVER = "--peer-python", "--llama-server"
BENCHES: Final = (
    Bench("gemm", 1200, 300),
    Bench("prefill", 1800, 300, peers=(PEER,)),
    Bench("decode", 1800, 300, peers=(PEER,)),
    Bench("attach", 1200, 300),
    Bench("restore", 1800, 300),
    Bench("decision", 1200, 300, options=("--questions",), peers=(PEER, SERVER)),
    Bench("decision", 1200, 300, options=("--threads", "2"), peers=(PEER, SERVER), cores=2),
    Bench("load", 1800, 300),
    Bench("memory", 1200, 300),
    Bench("broker", 900, 300),
    Bench("health", 900, 300),
)


class Outcome(Struct, frozen=True, kw_only=True):
    """What became of one bench. result: done, failed, or out of time. files: names of what it wrote. words: the end of what it
    printed, if it failed."""

    bench: str
    command: tuple[str, ...]
    result: str
    status: int
    took_s: float
    files: tuple[str, ...] = ()
    words: str = ""

    @property
    def well(self) -> bool:
        return self.result == "done"


def perform(label: str, command: Sequence[str], limit_s: float, show: Callable[[str], None]) -> Outcome:
    """Runs a bench to its end or its limit, with each line that it prints shown."""
    start = time.monotonic()
    late = threading.Event()
    lines: list[str] = []
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None

    def out_of_time() -> None:
        late.set()
        stop(process)

    timer = threading.Timer(limit_s, out_of_time)
    timer.start()
    try:
        for line in process.stdout:
            show(line)
            lines.append(line.rstrip("\n"))
        status = process.wait()
    except BaseException:
        stop(process)
        raise
    finally:
        timer.cancel()
        process.stdout.close()
    result = "out of time" if late.is_set() else "done" if status == 0 else "failed"
    written = [found[1] for line in lines if (found := WRITTEN.fullmatch(line))]
    return Outcome(
        bench=label,
        command=tuple(command),
        result=result,
        status=status,
        took_s=time.monotonic() - start,
        files=tuple(Path(path).name for path in written),
        words="" if result == "done" else "\n".join(lines[-WORDS_LINES:]),
    )


def environment() -> dict[str, str]:
    """Ours, with this Python's own programs found first: cmake and ninja come with '.[bench]', and a virtual environment need not
    be activated. Without make CMake is told to use ninja."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    generator = {} if shutil.which("make", path=path) else {"CMAKE_GENERATOR": "Ninja"}
    return generator | os.environ | {"PATH": path}


def stop(process: subprocess.Popen[str]) -> None:
    """Asks it and all that it started to end, and then makes them."""
    for which, wait_s in ((signal.SIGINT, STOP_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, which)
            process.wait(wait_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def command_of(bench: Bench, args: argparse.Namespace) -> list[str]:
    """The bench's command line, with what was given for all of them."""
    handed: list[str] = [*bench.options]
    handed += ["--quick"] if args.quick else []
    handed += ["--no-write"] if args.no_write else []
    for name in ("model", "cache_dir", "host_kind"):
        if (value := getattr(args, name)) is not None:
            handed += [f"--{name.replace('_', '-')}", str(value)]
    if args.out != RESULTS:
        handed += ["--out", str(args.out)]
    if PEER in bench.peers and args.peer_python is not None:
        handed += [PEER, args.peer_python]
    if SERVER in bench.peers and args.llama_server is not None:
        handed += [SERVER, args.llama_server]
    return [sys.executable, "-m", f"bench.{bench.name}", *handed]


def chosen(only: str | None, cores: int) -> list[Bench]:
    """The benches to run. Raises ValueError for a name that is none."""
    names = list(dict.fromkeys(bench.name for bench in BENCHES))
    wanted = names if only is None else only.split(",")
    if unknown := set(wanted) - set(names):
        raise ValueError(f"{', '.join(sorted(unknown))}: no such bench; there are {', '.join(names)}")
    return [bench for bench in BENCHES if bench.name in wanted and bench.cores <= cores]


def summary(outcomes: Sequence[Outcome], started: float, machine: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What is kept of the run."""
    return {
        "schema": 1,
        "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "took_s": round(time.time() - started, 1),
        "quick": args.quick,
        "machine": machine,
        "compiler": machine["compiler"],
        "versions": {"geist-pool": machine["geist_pool"], "python": machine["python"], **machine["packages"]},
        "peers": {"llama_server": args.llama_server is not None, "peer_python": args.peer_python is not None},
        "benches": outcomes,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rounds of each, to see that it works; not to be quoted")
    parser.add_argument("--only", metavar="NAMES", help="only these, separated by commas")
    parser.add_argument("--model", help="for all of them; default: each one's own")
    parser.add_argument("--peer-python", metavar="PATH", help="a Python with llama-cpp-python, for those that compare with it")
    parser.add_argument("--llama-server", metavar="PATH", help="for bench.decision; default: the one in PATH")
    parser.add_argument("--cache-dir", help="models and packed weights; default: the user's cache")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"where the results go; default {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--host-kind", help="the machine's name in the results' file names; default: from the processor's")
    parser.add_argument("--no-write", action="store_true", help="only print")
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    started, machine = time.time(), machine_facts()
    try:
        benches = chosen(args.only, machine["cores_allowed"])
    except ValueError as error:
        parser.error(str(error))
    outcomes: list[Outcome] = []
    for bench in benches:
        print(f"==== {bench.label}", flush=True)
        limit = bench.quick_limit_s if args.quick else bench.limit_s
        outcomes.append(perform(bench.label, command_of(bench, args), limit, lambda line: print(line, end="", flush=True)))
    print("\n" + "\n".join(f"{o.bench:<22} {o.result}, {o.took_s:.0f} s  {' '.join(o.files)}" for o in outcomes))
    if not args.no_write:
        args.out.mkdir(parents=True, exist_ok=True)
        kept = summary(outcomes, started, machine, args)
        path = args.out / f"run-{kept['started'][:10]}-{args.host_kind or host_kind(machine)}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
        print(f"written: {path}")
    return 0 if all(outcome.well for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(run(main))

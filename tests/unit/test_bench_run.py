"""Properties of running all benchmarks: one that fails or takes too long is named and the others still run, the exit status says
so, nothing that a bench started outlives it, peers are handed only to those that take them, and the account says which files
there are. Tolerance: none; nothing is timed but that a limit holds, with seconds to spare.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
try:
    run: Any = importlib.import_module("bench.run")
finally:
    sys.path.remove(str(ROOT))

FINE = 'print("a table"); print("written: /somewhere/attach-tiny-2026-01-02-here.json")'
FAILS = 'import sys; print("a check failed"); sys.exit(1)'


def perform(program: str, limit_s: float = 60.0) -> tuple[Any, str]:
    shown: list[str] = []
    return run.perform("tiny", [sys.executable, "-c", program], limit_s, shown.append), "".join(shown)


def test_what_a_bench_says_and_writes() -> None:
    outcome, shown = perform(FINE)
    assert outcome.well and outcome.status == 0 and outcome.words == ""
    assert outcome.files == ("attach-tiny-2026-01-02-here.json",)
    assert shown.startswith("a table\nwritten: ")


def test_a_failure_is_kept_with_its_last_words() -> None:
    outcome, _ = perform(FAILS)
    assert (outcome.result, outcome.status, outcome.words, outcome.files) == ("failed", 1, "a check failed", ())


def test_one_that_takes_too_long_is_ended_with_all_it_started() -> None:
    child = "import time; time.sleep(600)"
    program = (
        f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid, flush=True); p.wait()"
    )
    start = time.monotonic()
    outcome, shown = perform(program, limit_s=2.0)
    assert outcome.result == "out of time" and not outcome.well and time.monotonic() - start < 60
    pid = int(shown.split()[0])
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_others_run_on_and_the_status_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {"first": FINE, "second": FAILS, "third": FINE, "big": FINE}
    benches = [run.Bench(name, 60.0, 60.0, cores=1 if name != "big" else 1 << 20) for name in programs]
    monkeypatch.setattr(run, "BENCHES", tuple(benches))
    monkeypatch.setattr(run, "command_of", lambda bench, args: [sys.executable, "-c", programs[bench.name]])
    options = ["--quick", "--out", str(tmp_path), "--host-kind", "here"]
    assert run.main(options) == 1
    (path,) = tmp_path.glob("run-*-here.json")
    kept = json.loads(path.read_bytes())
    assert [(b["bench"], b["result"], len(b["files"])) for b in kept["benches"]] == [
        ("first", "done", 1),
        ("second", "failed", 0),
        ("third", "done", 1),
    ]
    assert kept["quick"] and kept["compiler"] == kept["machine"]["compiler"] and kept["versions"]["numpy"]
    path.unlink()
    assert run.main([*options, "--only", "first,third"]) == 0
    with pytest.raises(SystemExit):
        run.main([*options, "--only", "fourth"])


def test_command_lines() -> None:
    common = {"quick": True, "no_write": False, "model": "tiny", "cache_dir": None, "host_kind": None, "out": run.RESULTS}
    args = argparse.Namespace(**common, peer_python="py", llama_server="srv")
    commands = {bench.label: run.command_of(bench, args)[2:] for bench in run.BENCHES}
    assert commands["attach"] == ["bench.attach", "--quick", "--model", "tiny"]
    assert commands["decision --questions"] == [
        "bench.decision", "--questions", "--quick", "--model", "tiny", "--peer-python", "py", "--llama-server", "srv",
    ]  # fmt: skip
    assert {bench.name for bench in run.BENCHES} == {
        "gemm", "prefill", "decode", "attach", "restore", "decision", "load", "memory", "broker", "health",
    }  # fmt: skip
    assert all((ROOT / "bench" / f"{bench.name}.py").is_file() for bench in run.BENCHES)

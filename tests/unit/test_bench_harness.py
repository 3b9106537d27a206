"""Properties of the measuring harness: order statistics equal those of numpy's linear quantiles (to 1e-12, both are sums of a few
products), ratios are of pairs of one round, every side runs once a round and no side always comes first, a result reads back as
it was written to six digits (so much is kept), and work is counted as a hand count says. Times themselves are not looked at.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]


def _bench(name: str) -> ModuleType:
    """A module of bench/, which lies beside the package and is not installed."""
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module(f"bench.{name}")
    finally:
        sys.path.remove(str(ROOT))


harness: Any = _bench("harness")
work: Any = _bench("work")

times = st.floats(min_value=1e-9, max_value=1e3, allow_subnormal=False)


# ---- statistics


@given(st.lists(times, min_size=1, max_size=40))
def test_spread_equals_linear_quantiles(samples: list[float]) -> None:
    s = harness.Spread.of(samples)
    assert (s.n, s.min, s.max) == (len(samples), min(samples), max(samples))
    assert (s.q1, s.median, s.q3) == pytest.approx(tuple(np.quantile(samples, (0.25, 0.5, 0.75))), rel=1e-12)


def test_spread_by_hand() -> None:
    s = harness.Spread.of([4.0, 1.0, 3.0, 2.0])
    assert (s.min, s.q1, s.median, s.q3, s.max) == (1.0, 1.75, 2.5, 3.25, 4.0)
    with pytest.raises(ValueError, match="no samples"):
        harness.Spread.of([])


def test_ratios_are_pair_by_pair() -> None:
    # The ratio of the medians would be 3; the median of the pairs is 2.
    assert harness.ratios([2.0, 6.0, 30.0], [1.0, 3.0, 2.0]) == [2.0, 2.0, 15.0]
    with pytest.raises(ValueError, match="no pairs"):
        harness.ratios([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="not positive"):
        harness.ratios([1.0], [0.0])


# ---- taking turns


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_every_side_runs_once_a_round_and_begins_equally_often(n: int) -> None:
    rounds = [harness.order(r, n) for r in range(-2, 2 * n)]
    assert all(sorted(o) == list(range(n)) for o in rounds)
    firsts = Counter(o[0] for o in rounds[2:])
    assert set(firsts.values()) == {2} and len(firsts) == n
    if n > 1:  # neither side of a pair always comes before the other
        befores = Counter(o.index(0) < o.index(1) for o in rounds[2:])
        assert befores[True] == befores[False]


def test_samples_belong_to_their_round_and_warm_ups_are_not_kept() -> None:
    calls: list[str] = []

    def turn(name: str) -> Any:
        def run(clock: Any) -> None:
            assert not gc.isenabled()
            calls.append(name)
            clock.taken[name] = float(calls.count(name))

        return run

    samples = harness.interleave([turn("a"), turn("b"), turn("c")], 4, warmups=2)
    assert samples == {name: [3.0, 4.0, 5.0, 6.0] for name in "abc"}
    assert Counter(calls) == {"a": 6, "b": 6, "c": 6}
    assert gc.isenabled()


def test_clock_times_only_what_it_surrounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100, 350, 1000, 1007])
    monkeypatch.setattr(harness.time, "perf_counter_ns", lambda: next(now))
    clock = harness.Clock()
    with clock("first"):
        pass
    with clock("second"):
        pass
    assert clock.taken == pytest.approx({"first": 250e-9, "second": 7e-9})
    with pytest.raises(ValueError, match="timed twice"):
        clock("first")


def test_a_turn_that_forgets_or_repeats_a_name_is_an_error() -> None:
    def same(clock: Any) -> None:
        clock.taken["x"] = 1.0

    with pytest.raises(ValueError, match="x timed twice"):
        harness.interleave([same, same], 1)

    rounds = iter(range(10))

    def forgets(clock: Any) -> None:
        clock.taken["even" if next(rounds) % 2 == 0 else "odd"] = 1.0

    with pytest.raises(ValueError, match="those before"):
        harness.interleave([forgets], 2, warmups=0)
    with pytest.raises(ValueError, match="at least one"):
        harness.interleave([], 1)
    assert gc.isenabled()


# ---- results


def _book() -> Any:
    book = harness.Book()
    samples = {"slow": [3.0, 4.0, 8.0], "fast": [1.0, 2.0, 2.0]}
    book.add("700 tokens", samples, {"slow": {"macs": 10, "tokens": 700}, "fast": {"bytes": 4}})
    book.ratio("700 tokens", "slow", "fast")
    return book


def _report(**changes: Any) -> Any:
    book = _book()
    fields: dict[str, Any] = {
        "bench": "restore-tiny",
        "started": "2026-01-02T03:04:05+00:00",
        "took_s": 1.23456789,
        "quick": True,
        "machine": harness.machine_facts() | {"load_at_end": [0.0, 0.0, 0.0]},
        "subject": {"model": "tiny.gguf"},
        "settings": {"tier": "scalar", "repeats": 3},
        "rows": tuple(book.rows),
        "ratios": tuple(book.ratios),
        "checks": (harness.Check(what="equal", n=3, failed=0),),
        "facts": {"flat_bytes": 12},
    }
    return harness.Report(**(fields | changes))


def test_book_keeps_samples_and_compares_pairs() -> None:
    book = _book()
    row = book.row("700 tokens", "slow")
    assert row.samples == (3.0, 4.0, 8.0) and row.seconds.median == 4.0 and row.stands_for == {"macs": 10, "tokens": 700}
    assert book.ratios[0].pairs == harness.Spread.of([3.0, 2.0, 4.0])
    with pytest.raises(ValueError, match="described"):
        book.add("x", {"a": [1.0]}, {"b": {}})
    with pytest.raises(KeyError):
        book.row("700 tokens", "unknown")


def test_json_shape_and_round_trip(tmp_path: Path) -> None:
    report = _report()
    path = harness.write(report, tmp_path / "results", "some-cpu-2c")
    assert path.name == "restore-tiny-2026-01-02-some-cpu-2c.json"
    data = json.loads(path.read_text())
    assert set(data) == {
        "schema", "bench", "started", "took_s", "quick", "machine", "subject", "settings", "rows", "ratios", "checks", "facts",
    }  # fmt: skip
    assert data["schema"] == 1 and data["took_s"] == 1.23457
    assert set(data["rows"][0]) == {"group", "name", "seconds", "samples", "stands_for", "note"}
    assert set(data["rows"][0]["seconds"]) == {"n", "min", "q1", "median", "q3", "max"} == set(data["ratios"][0]["pairs"])
    assert data["ratios"][0]["over"] == "slow" and data["ratios"][0]["under"] == "fast"
    again = harness.read(path)
    assert again.rows == report.rows and again.ratios == report.ratios and again.checks == report.checks


def test_a_failed_check_is_not_kept_and_ends_in_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = SimpleNamespace(quick=False, no_write=False, out=tmp_path, host_kind="here")
    machine = harness.machine_facts()

    def finish(failed: int) -> int:
        checks = [harness.Check(what="answers are equal", n=3, failed=failed)]
        status: int = harness.finish(
            args, "tiny", 0.0, machine, _book(), subject={}, settings={}, checks=checks, facts={"ratio": 2.5}
        )
        return status

    assert finish(1) == 1 and not list(tmp_path.iterdir())
    assert "FAILED 1 times: answers are equal" in capsys.readouterr().out
    assert finish(0) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["tiny-1970-01-01-here.json"]
    assert "holds: answers are equal (3 times)" in capsys.readouterr().out


def test_table_has_every_row_and_ratio() -> None:
    text = harness.table(_report())
    assert "too few repeats to quote" in text
    assert "4s" in text and "10 GMAC" not in text and "700 tokens" in text
    assert "slow / fast  3x  (2.5 .. 3.5, 3 pairs)" in text
    assert "too few" not in harness.table(_report(quick=False))


# ---- the machine


def test_machine_facts_name_what_a_reader_needs() -> None:
    facts = harness.machine_facts()
    assert {"cpu", "cores_allowed", "flags", "kernel", "compiler", "python", "packages", "commit", "load_at_start"} <= set(facts)
    assert facts["compiler"] and ("GCC" in facts["compiler"] or "clang" in facts["compiler"])
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["cores_allowed"] >= 1
    json.dumps(facts)


@pytest.mark.parametrize(
    ("cpuinfo", "cores", "kind"),
    [
        ("model name\t: AMD EPYC\nflags\t\t: avx2\n", 2, "amd-epyc-2c"),
        ("model name : Intel(R) Xeon(R) Platinum 8488C CPU @ 2.40GHz\n", 8, "intel-xeon-platinum-8488c-8c"),
        ("model name : AMD Ryzen 9 9950X 16-Core Processor\n", 16, "amd-ryzen-9-9950x-16-core-16c"),
        ("CPU part\t: 0xd40\n", 4, "arm-part-0xd40-4c"),
        ("", 1, "unknown-1c"),
    ],
)
def test_host_kind_is_a_word_for_file_names(cpuinfo: str, cores: int, kind: str) -> None:
    assert harness.host_kind({"cpu": harness.cpu_name(cpuinfo), "cores_allowed": cores}) == kind


# ---- what work stands for


def test_macs_by_hand() -> None:
    info = SimpleNamespace(n_layers=1, n_attention_layers=1, n_heads=2, head_dim=4, n_embd=8, n_vocab=10, recurrent_bytes=4 * 6)
    tensors = [
        SimpleNamespace(name="token_embd.weight", dims=(8, 10)),  # a look-up
        SimpleNamespace(name="blk.0.attn_q.weight", dims=(8, 8)),
        SimpleNamespace(name="blk.0.attn_norm.weight", dims=(8,)),
        SimpleNamespace(name="blk.1.attn_q.weight", dims=(8, 8)),  # behind the layers that are computed
    ]
    # 3 tokens behind 2: matrix 3 * 64, logits once 80, attention 2 * 8 * (3 + 4 + 5), states 3 * 6 * 3
    assert work.pass_macs(info, tensors, 3, before=2) == 192 + 80 + 192 + 54
    parts = sum(work.pass_macs(info, tensors, 1, before=i) for i in range(5))
    assert parts == work.pass_macs(info, tensors, 5) + 4 * 80  # the same work, but for the logits of each pass

"""Properties of the table of results: it says what the newest result of a bench, model, setting and machine says and nothing
else, a bar is met or not as its own words say, what has no result reads "not measured", quick runs are left out, a file that is
no result is named and skipped, and only what lies between the markers changes. Tolerance: none; figures are made up.
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
    report: Any = importlib.import_module("bench.report")
finally:
    sys.path.remove(str(ROOT))

MACHINE = {
    "cpu": "Some CPU", "cores_allowed": 2, "flags": ["avx2"], "kernel": "Linux 6", "compiler": "gcc 12", "python": "3.11",
    "commit": "abc", "load_at_start": [0.0], "load_at_end": [0.0],
}  # fmt: skip
SERVER, LOOP = "decision: llama-server over kept context", "decision: best loop on llama.cpp over kept context"
MODEL = "qwen35-0.8b-q8_0"


def keep(
    where: Path, bench: str, facts: dict[str, Any], day: str = "2026-01-02", kind: str = "here", quick: bool = False
) -> None:
    book = harness.Book()
    book.add("a group", {"slow": [3.0, 4.0], "fast": [0.01, 0.02]}, {"slow": {}, "fast": {}})
    fields: dict[str, Any] = {
        "bench": bench,
        "started": f"{day}T03:04:05+00:00",
        "took_s": 1.0,
        "quick": quick,
        "machine": MACHINE,
        "subject": {},
        "settings": {},
        "rows": tuple(book.rows),
        "ratios": (),
        "facts": facts,
    }
    harness.write(harness.Report(**fields), where, kind)


def cells(markdown: str) -> list[list[str]]:
    """The table's lines below its head."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_bars_beside_figures(tmp_path: Path) -> None:
    keep(tmp_path, f"decision-{MODEL}-w1t1", {"llama_server_over_kept": 31.41, "llama_loop_over_kept": 4.49})
    keep(tmp_path, "attach-tiny", {"attach_us_at_700": 212.4, "first_pass_after_attach_over_restore_at_7000": 1.031})
    keep(tmp_path, "broker-tiny", {"requests_per_second": 6535.2, "cpu_us_per_request": 200})
    text = report.table(report.results(tmp_path))
    rows = {row[0]: row[1:] for row in cells(text)}
    assert text.startswith("Some CPU, 2 cores (avx2), Linux 6, gcc 12, 2026-01-02:\n\n| what |")
    assert rows[SERVER] == [f"{MODEL}-w1t1", "31.4 x", "at least 20 x", "yes"]
    assert rows[LOOP] == [f"{MODEL}-w1t1", "4.49 x", "at least 4.5 x", "no"]
    assert rows["attach to 700 tokens"][:2] == ["tiny", "212 us"]
    assert rows["first pass after attach over after a restore, 7000 tokens"] == ["tiny", "1.03 x", "at most 1.03 x", "no"]
    assert rows["broker: processor time of a request"] == ["tiny", "200 us", "at most 200 us", "yes"]
    assert rows["broker: requests a second"] == ["tiny", "6,535", "at least 4,000", "yes"]


def test_nothing_is_made_up(tmp_path: Path) -> None:
    rows = cells(report.table(report.results(tmp_path)))
    assert len(rows) == len(report.BARS)
    assert all(row[2] == "not measured" and row[4] == "-" for row in rows)
    # Another model's figure is not the one that has the bar, and a figure that is none is not shown.
    keep(tmp_path, "decision-tiny-w1t1", {"llama_server_over_kept": 31.4, "decision_ms": 12.3})
    keep(tmp_path, f"decision-{MODEL}-w1t1", {"llama_loop_over_kept": "skipped", "decision_ms": True})
    rows = cells(report.table(report.results(tmp_path)))
    assert [row[1:] for row in rows if row[0] == SERVER] == [
        [MODEL, "not measured", "at least 20 x", "-"],
        ["tiny-w1t1", "31.4 x", "-", "-"],
    ]
    assert [row[1:] for row in rows if row[0] == LOOP] == [[MODEL, "not measured", "at least 4.5 x", "-"]]
    assert [row[1:3] for row in rows if row[2] != "not measured"] == [["tiny-w1t1", "31.4 x"], ["tiny-w1t1", "12.3 ms"]]


def test_newest_of_each_and_a_table_for_each_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for day, value in (("2026-01-02", 1.0), ("2026-01-04", 2.0), ("2026-01-03", 3.0)):
        keep(tmp_path, "attach-tiny", {"attach_us_at_700": value}, day=day)
    keep(tmp_path, "attach-tiny", {"attach_us_at_700": 4.0}, day="2026-01-09", quick=True)
    keep(tmp_path, "attach-tiny", {"attach_us_at_700": 5.0}, kind="there")
    keep(tmp_path, "attach-other", {"attach_us_at_700": 6.0})
    (tmp_path / "run-2026-01-02-here.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    found = report.results(tmp_path)
    assert [(r.machine, r.setup, r.report.facts["attach_us_at_700"]) for r in found] == [
        ("here", "other", 6.0),
        ("here", "tiny", 2.0),
        ("there", "tiny", 5.0),
    ]
    assert "broken.json is left out" in capsys.readouterr().err
    text = report.table(found)
    assert text.count("| what |") == 2 and "2026-01-02 to 2026-01-04:" in text
    assert {r.report.facts["attach_us_at_700"] for r in report.results(tmp_path, quick=True)} == {4.0, 5.0, 6.0}


def test_only_what_is_between_the_markers_changes(tmp_path: Path) -> None:
    readme, kept = tmp_path / "README.md", tmp_path / "results"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    keep(kept, "attach-tiny", {"attach_us_at_700": 212.4})
    options = ["--results", str(kept), "--readme", str(readme), "--no-plots"]
    assert report.main([*options, "--check"]) == 1 and "old" in readme.read_text()
    assert report.main(options) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n\nSome CPU") and text.endswith(f"|\n\n{report.END}\nafter\n")
    assert "old" not in text and report.main([*options, "--check"]) == 0
    readme.write_text("no markers")
    assert report.main(options) == 1 and readme.read_text() == "no markers"


def test_the_projects_own_readme_shows_the_projects_own_results() -> None:
    assert report.main(["--check"]) == 0


def test_a_plot_is_the_same_bytes_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib comes with '.[bench]'")
    keep(tmp_path, "attach-tiny", {})
    (result,) = report.results(tmp_path)
    path = report.plot(result, tmp_path / "plots")
    first = path.read_bytes()
    assert path.name == "attach-tiny-here.svg" and first.startswith(b"<?xml")
    assert report.plot(result, tmp_path / "plots").read_bytes() == first

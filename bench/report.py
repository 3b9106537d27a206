"""What has been measured, as a table with the bars beside the figures, and as plots.

    python -m bench.report [--results DIR] [--readme README.md] [--plots docs/plots] [--check]

Reads the newest result of each bench, model, setting and machine. The table goes between the two marker lines of the README;
nothing is in it that no result says: what was not measured reads "not measured". Results of quick runs are left out. --check
writes nothing and ends with status 1 if the README's table is not the one that the results give.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from bench.harness import RESULTS, ROOT, Report, read, run

BEGIN: Final = "<!-- bench table: begin (python -m bench.report writes it) -->"
END: Final = "<!-- bench table: end -->"
NOT_MEASURED: Final = "not measured"
NONE: Final = "-"
HYBRID: Final = "qwen35-0.8b-q8_0"


class Bar(NamedTuple):
    """A line of the table. fact: a pattern for the names of facts, whose group, if any, goes into `what`. least, most: the bar,
    in the figure's own unit. unit: behind the figure. model: a part of the bench's name, where only that model has the bar;
    others are shown without."""

    bench: str
    fact: str
    what: str
    unit: str = ""
    least: float | None = None
    most: float | None = None
    model: str = ""

    @property
    def bar(self) -> str:
        """In words."""
        sides = [("at least", self.least), ("at most", self.most)]
        return ", ".join(f"{word} {number(value)}{self.unit}" for word, value in sides if value is not None) or NONE

    def met(self, value: float) -> str:
        if self.least is None and self.most is None:
            return NONE
        return "yes" if (self.least is None or value >= self.least) and (self.most is None or value <= self.most) else "no"


BARS: Final = (
    Bar("gemm", r"(\w+)_pass_512_share_of_vpdpbusd", "products of a pass of 512 tokens, {}, share of the core's peak"),
    Bar("prefill", r"prefill_(\d+)_ratio_(\d+)t", "prefill of {} tokens: llama.cpp over ours, threads: {}", " x"),
    Bar("prefill", r"prefill_(\d+)_tokens_s_(\d+)t", "prefill of {} tokens, threads: {}", " tokens/s"),
    Bar("decode", r"decode_ratio_(\d+)t", "decode: llama.cpp over ours, threads: {}", " x"),
    Bar("decode", r"decode_share_of_read_(\d+)t", "decode: share of a plain read of the weights, threads: {}"),
    Bar("decision", "llama_server_over_kept", "decision: llama-server over kept context", " x", least=20, model=HYBRID),
    Bar("decision", "llama_loop_over_kept", "decision: best loop on llama.cpp over kept context", " x", least=4.5, model=HYBRID),
    Bar("decision", "llama_server_primed_over_kept", "decision: llama-server, sent the context first, over kept context", " x"),
    Bar("decision", "decision_ms", "decision: 100 tokens behind 700 kept, one token answered", " ms"),
    Bar("decision", "whole_prompt_over_kept", "decision: whole prompt over kept context", " x"),
    Bar("attach", r"attach_us_at_(\d+)", "attach to {} tokens", " us"),
    Bar(
        "attach",
        r"first_pass_after_attach_over_prefill_at_(\d+)",
        "first pass after attach over after a prefill, {} tokens",
        " x",
        most=1.03,
    ),
    Bar(
        "attach",
        r"first_pass_after_attach_over_restore_at_(\d+)",
        "first pass after attach over after a restore, {} tokens",
        " x",
        most=1.03,
    ),
    Bar("attach", r"first_mapping_ms_per_10mb_at_(\d+)", "first mapping and verifying, per 10 MB, {} tokens", " ms"),
    Bar("restore", r"flat_restore_share_of_memcpy_at_(\d+)", "flat restore of {} tokens, share of memcpy's rate"),
    Bar("restore", r"flat_snapshot_share_of_memcpy_at_(\d+)", "flat snapshot of {} tokens, share of memcpy's rate"),
    Bar("restore", r"publish_over_memcpy_at_(\d+)", "publishing {} tokens over memcpy", " x"),
    Bar("load", "first_answer_ms", "from a pool's start to its first answer", " ms", most=1000),
    Bar("memory", "private_dirty_mb_of_another_worker", "memory that another worker adds (private, dirty)", " MB", most=64),
    Bar("broker", "cpu_us_per_request", "broker: processor time of a request", " us", most=200),
    Bar("broker", "round_trip_over_echo_us", "broker: round trip over a bare echo", " us", most=300),
    Bar("broker", "requests_per_second", "broker: requests a second", least=4000),
    Bar("health", "health_p99_ms", "health of a busy pool, 99th percentile", " ms", most=50),
    Bar("health", "broker_restart_most_s", "broker killed: until every context is found", " s", most=3),
)


class Result(NamedTuple):
    """A result that was kept, and the machine's word in its name."""

    path: Path
    machine: str
    report: Report

    @property
    def bench(self) -> str:
        return self.report.bench.split("-")[0]

    @property
    def setup(self) -> str:
        """What of its name is not the bench: model, workers, threads."""
        return self.report.bench.partition("-")[2] or NONE


class Line(NamedTuple):
    """A line of the table, in words."""

    what: str
    setup: str
    figure: str
    bar: str
    met: str


# ---- results


def results(directory: Path, *, quick: bool = False) -> list[Result]:
    """The newest of each bench and machine (a bench's name holds model and settings), by name; quick runs only if asked for."""
    newest: dict[tuple[str, str], Result] = {}
    for path in sorted(directory.glob("*.json")):
        if path.name.startswith("run-"):  # bench.run's own account
            continue
        try:
            report = read(path)
        except (msgspec.DecodeError, OSError) as error:
            print(f"{path.name} is left out: {error}", file=sys.stderr)
            continue
        if report.quick and not quick:
            continue
        machine = path.stem.removeprefix(f"{report.bench}-{report.started[:10]}-")
        before = newest.get((report.bench, machine))
        if before is None or before.report.started < report.started:
            newest[report.bench, machine] = Result(path, machine, report)
    return [newest[key] for key in sorted(newest)]


def lines(found: Sequence[Result], bars: Sequence[Bar] = BARS) -> list[Line]:
    """Every bar with what the results of one machine say of it."""
    out: list[Line] = []
    for bar in bars:
        of_bar = [line for result in found if result.bench == bar.bench for line in _lines_of(bar, result)]
        if not any(line.bar == bar.bar for line in of_bar):  # the model that has the bar was not measured, whatever others were
            out.append(Line(bar.what.format(*"N" * re.compile(bar.fact).groups), bar.model or NONE, NOT_MEASURED, bar.bar, NONE))
        out += of_bar
    return out


def _lines_of(bar: Bar, result: Result) -> list[Line]:
    has_bar = bar.model in result.report.bench
    out: list[Line] = []
    for name, value in result.report.facts.items():
        named = re.fullmatch(bar.fact, name)
        if named is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        held = (bar.bar, bar.met(value)) if has_bar else (NONE, NONE)
        out.append(Line(bar.what.format(*named.groups()), result.setup, number(value) + bar.unit, *held))
    return out


def number(x: float) -> str:
    """Three digits, and no exponent."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


# ---- the table


def table(found: Sequence[Result]) -> str:
    """The lines between the markers: a table for each machine."""
    machines = list(dict.fromkeys(result.machine for result in found))
    parts = [_of_machine([r for r in found if r.machine == machine]) for machine in machines]
    return "\n\n".join(parts or [_markdown(lines([]))])


def _of_machine(found: Sequence[Result]) -> str:
    newest = max(found, key=lambda result: result.report.started).report
    machine = newest.machine
    days = sorted({result.report.started[:10] for result in found})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    about = (
        f"{machine['cpu']}, {machine['cores_allowed']} cores ({' '.join(machine['flags'])}), {machine['kernel']}, "
        f"{machine['compiler']}, {when}:"
    )
    return f"{about}\n\n{_markdown(lines(found))}"


def _markdown(of: Iterable[Line]) -> str:
    rows = [("what", "model, workers, threads", "figure", "bar", "met"), ("---",) * 5, *of]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def put(text: str, new: str) -> str:
    """The text with what lies between its two markers replaced. Raises ValueError without them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the two marker lines are missing: {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{new}\n\n{END}{tail}"


# ---- plots


def plot(result: Result, directory: Path) -> Path:
    """One picture of a result: for each group its times, median with quartiles. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    settings = {"svg.hashsalt": "geist-pool", "svg.fonttype": "none", "font.size": 8}  # the same result gives the same bytes
    matplotlib.rcParams.update(settings)
    from matplotlib import pyplot

    report = result.report
    groups = list(dict.fromkeys(row.group for row in report.rows))
    counts = [sum(row.group == group for row in report.rows) for group in groups]
    figure, axes = pyplot.subplots(
        len(groups),
        1,
        figsize=(8, 0.9 * len(groups) + 0.22 * sum(counts)),
        height_ratios=counts,
        squeeze=False,
        layout="constrained",
    )
    for group, axis in zip(groups, axes[:, 0], strict=True):
        _draw(axis, [row for row in report.rows if row.group == group])
        axis.set_title(group, loc="left")
    axes[-1, 0].set_xlabel("milliseconds, median and quartiles")
    figure.suptitle(f"{report.bench}, {report.machine['cpu']}, {report.machine['cores_allowed']} cores, {report.started[:10]}")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{report.bench}-{result.machine}.svg"
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def _draw(axis: Any, rows: Sequence[Any]) -> None:
    medians = [1e3 * row.seconds.median for row in rows]
    below = [1e3 * (row.seconds.median - row.seconds.q1) for row in rows]
    above = [1e3 * (row.seconds.q3 - row.seconds.median) for row in rows]
    axis.barh(range(len(rows)), medians, xerr=(below, above), height=0.7, color="#7a9cc6", ecolor="#333333")
    axis.set_yticks(range(len(rows)), [row.name for row in rows])
    axis.invert_yaxis()
    if max(medians) > 30 * max(min(medians), 1e-9):
        axis.set_xscale("log")


# ---- the command


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="file with the marker lines; default README.md")
    parser.add_argument("--plots", type=Path, default=ROOT / "docs" / "plots", help="default docs/plots")
    parser.add_argument("--no-plots", action="store_true", help="the table only")
    parser.add_argument("--with-quick", action="store_true", help="quick runs too; to see how it looks, not to be kept")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if the file's table is out of date")
    args = parser.parse_args(argv)
    found = results(args.results, quick=args.with_quick)
    text = args.readme.read_text("utf-8")
    try:
        new = put(text, table(found))
    except ValueError as error:
        print(f"error: {args.readme}: {error}", file=sys.stderr)
        return 1
    if args.check:
        if new != text:
            print(f"{args.readme} does not show these results; python -m bench.report writes the table", file=sys.stderr)
        return int(new != text)
    if new != text:
        args.readme.write_text(new, "utf-8")
    print(f"{args.readme}: {len(found)} results")
    if args.no_plots:
        return 0
    try:
        for result in found:
            print(plot(result, args.plots))
    except ImportError:
        print("error: the plots need matplotlib: pip install '.[bench]'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(main))

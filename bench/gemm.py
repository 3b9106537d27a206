"""How fast the quantised products of a model's pass are on one thread, beside what the core could do at most.

    python -m bench.gemm [--model qwen35-0.8b-q8_0[,...]] [--tokens 1,8,16,64,128,512] [--quick]

It builds bench/native/bench_kernels.c with the engine's own flags and asks it for the products of the model's layers, once a
round; each run measures its own peak. Weights are cold: every call takes another copy, as a pass does. A pass is the sum over all
quantised matrices of the layers, so its share of the peak is what prefill could have if nothing but products took time.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import limits, shapes
from bench.harness import ROOT, BenchError, Book, Check, arguments, fetched_model, finish, machine_facts, run, show_progress

MODELS: Final = ("qwen35-0.8b-q8_0", "qwen35-0.8b-q4_0")
TOKENS, QUICK_TOKENS = (1, 8, 16, 64, 128, 512), (1, 64, 512)
REPEATS, QUICK_REPEATS = 3, 1
FIGURE_S, QUICK_FIGURE_S = 0.06, 0.02
FEWEST_ROWS: Final = 64  # narrower matrices hardly count, and are no measure of a kernel

PACKS: Final = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")  # the types that are packed; others are floats

Matrix = tuple[int, int]  # rows, columns


class Product(NamedTuple):
    """One measured figure: multiply-adds a second of a matrix with so many tokens."""

    tier: str
    pack: str
    matrix: Matrix
    tokens: int
    rate: float


class Output(NamedTuple):
    """What a run of bench_kernels printed. Rates a second; peak: of vpdpbusd, 0 where there is none; read: bytes."""

    peak: float
    fma: float
    read: float
    products: list[Product]


_PEAK: Final = re.compile(r"^peak of this core: vpdpbusd ([\d.]+) GMAC/s, f32 fma ([\d.]+) GMAC/s, reading memory ([\d.]+) GB/s$")
_PRODUCT: Final = re.compile(
    r"^(\w+) +matmul (\w+) +(\d+) x +(\d+) cold T=(\d+) +[\d.]+ GB/s +([\d.]+) GMAC/s(?: \( *[\d.]+ %\))?$"
)


def parse(text: str) -> Output:
    """Raises ValueError for text without the line of peaks, or with a line that is neither that nor a cold product."""
    peaks: tuple[float, ...] = ()
    products: list[Product] = []
    for line in text.splitlines():
        if found := _PEAK.match(line):
            peaks = tuple(float(word) * 1e9 for word in found.groups())
        elif found := _PRODUCT.match(line):
            tier, pack, rows, columns, tokens, rate = found.groups()
            products.append(Product(tier, pack, (int(rows), int(columns)), int(tokens), float(rate) * 1e9))
        else:
            raise ValueError(f"bench_kernels printed {line!r}")
    if not peaks:
        raise ValueError("bench_kernels printed no peak")
    peak, fma, read = peaks
    return Output(peak, fma, read, products)


def matrices(name: str, cache_dir: str | None) -> dict[str, Counter[Matrix]]:
    """By type, how often each shape of matrix occurs in the layers. A model with random weights need not be made for it."""
    from geist_pool.engine import Engine, Gguf

    if shapes.is_shape(name):
        shape, kind = shapes.parse(name)
        tensors = [(t.name, kind.upper() if t.kind == "matrix" else "F32", t.dims) for t in shapes.tensors(shape)]
    else:
        with Engine("scalar") as engine, Gguf(engine, fetched_model(name, cache_dir)[0]) as gguf:
            tensors = [(t.name, t.type, t.dims) for t in gguf.tensors()]
    found: dict[str, Counter[Matrix]] = {}
    for tensor, kind, dims in tensors:
        if tensor.startswith("blk.") and kind in PACKS and len(dims) == 2 and dims[1] >= FEWEST_ROWS:
            found.setdefault(kind, Counter())[dims[1], dims[0]] += 1
    return found


def build(folder: Path) -> Path:
    """Compiles the engine's library and bench_kernels."""
    native = ROOT / "native"
    limits.compiled(["cmake", "-S", str(native), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"])
    limits.compiled(["cmake", "--build", str(folder), "--target", "geist", "--parallel", "2"])
    program = folder / "bench_kernels"
    source = ROOT / "bench" / "native" / "bench_kernels.c"
    includes = [f"-I{native / 'include'}", f"-I{native / 'src'}"]
    library = [str(folder / "libgeist.a"), "-lm", "-pthread"]
    limits.compiled([limits.compiler(), *limits.FLAGS, *includes, str(source), *library, "-o", str(program)])
    return program


def measured(program: Path, seconds: float, tier: str, pack: str, shapes_: Sequence[Matrix], tokens: Sequence[int]) -> Output:
    """One run of bench_kernels. Raises BenchError where it does not run as it should."""
    words = [",".join(f"{rows}x{columns}" for rows, columns in shapes_), ",".join(map(str, tokens))]
    done = subprocess.run([str(program), str(seconds), tier, pack, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"bench_kernels ended with {done.returncode}: {done.stderr.strip()}")
    try:
        return parse(done.stdout)
    except ValueError as error:
        raise BenchError(str(error)) from error


def add_rows(
    book: Book, pack: str, counts: Mapping[Matrix, int], tokens: Sequence[int], outputs: Sequence[Output]
) -> dict[str, Any]:
    """A row for each product, and one for all products of a pass; the facts. A sample is a run's."""
    seconds: dict[tuple[Matrix, int], list[float]] = {}
    for output in outputs:
        for p in output.products:
            seconds.setdefault((p.matrix, p.tokens), []).append(p.matrix[0] * p.matrix[1] * p.tokens / p.rate)
    for matrix in counts:
        samples = {f"T={t}": seconds[matrix, t] for t in tokens}
        work = {f"T={t}": {"macs": matrix[0] * matrix[1] * t} for t in tokens}
        book.add(f"{pack}, {matrix[0]} x {matrix[1]} ({counts[matrix]} a pass)", samples, work)
    passes: dict[str, list[float]] = {}
    work = {}
    facts: dict[str, Any] = {}
    for t in tokens:
        of_runs = zip(*(seconds[matrix, t] for matrix in counts), strict=True)
        passes[f"T={t}"] = [sum(n * s for n, s in zip(counts.values(), run_, strict=True)) for run_ in of_runs]
        macs = sum(n * m[0] * m[1] * t for m, n in counts.items())
        work[f"T={t}"] = {"macs": macs}
        rates = [macs / s for s in passes[f"T={t}"]]
        facts[f"{pack.lower()}_pass_{t}_gmac_s"] = statistics.median(rates) / 1e9
        if all(output.peak for output in outputs):
            shares = [rate / output.peak for rate, output in zip(rates, outputs, strict=True)]
            facts[f"{pack.lower()}_pass_{t}_share_of_vpdpbusd"] = statistics.median(shares)
    book.add(f"{pack}, all products of a pass", passes, work)
    return facts


def measure(args: Any, name: str, program: Path, tier: str, tokens: Sequence[int], seconds: float, repeats: int) -> int:
    """One model's report; the exit status."""
    started, machine = time.time(), machine_facts()
    by_pack = matrices(name, args.cache_dir)
    outputs: dict[str, list[Output]] = {pack: [] for pack in by_pack}
    progress = show_progress(f"products of {name}")
    for i in range(repeats):
        for pack, counts in by_pack.items():
            outputs[pack].append(measured(program, seconds, tier, pack, list(counts), tokens))
        progress(i + 1, repeats)
    every = [output for found in outputs.values() for output in found]
    if not every:
        raise BenchError(f"{name} has no quantised matrices")
    book = Book()
    facts: dict[str, Any] = {
        "vpdpbusd_gmac_s": statistics.median(output.peak for output in every) / 1e9,
        "fma_gmac_s": statistics.median(output.fma for output in every) / 1e9,
        "read_gb_s": statistics.median(output.read for output in every) / 1e9,
    }
    for pack, counts in by_pack.items():
        facts |= add_rows(book, pack, counts, tokens, outputs[pack])
    wanted = sum(len(counts) for counts in by_pack.values()) * len(tokens) * repeats
    got = sum(len(output.products) for output in every)
    wrong = wanted - got + sum(p.tier != tier for output in every for p in output.products)
    checks = [Check(what=f"every product was measured, in the tier {tier}", n=wanted, failed=wrong)]
    settings = {"tier": tier, "threads": 1, "weights": "cold", "seconds_per_figure": seconds, "repeats": repeats}
    stem = Path(name).stem if name.endswith(".gguf") else name
    subject = {"model": name, "compiler": limits.compiler()}
    bench = f"gemm-{stem.lower()}"
    return finish(args, bench, started, machine, book, subject=subject, settings=settings, checks=checks, facts=facts)


def main(argv: list[str] | None = None) -> int:
    from geist_pool.engine import Engine

    parser = arguments(__doc__ or "", models=MODELS)
    parser.add_argument("--tokens", help=f"tokens at a time, separated by commas; default {','.join(map(str, TOKENS))}")
    args = parser.parse_args(argv)
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    seconds = QUICK_FIGURE_S if args.quick else FIGURE_S
    tokens = [int(word) for word in args.tokens.split(",")] if args.tokens else list(QUICK_TOKENS if args.quick else TOKENS)
    with Engine(args.tier) as engine:
        tier = engine.tier
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        program = build(Path(folder))
        return max(measure(args, name, program, tier, tokens, seconds, repeats) for name in args.model)


if __name__ == "__main__":
    sys.exit(run(main))

"""Properties of the measurements of single passes: what bench_kernels prints is read in full or refused, a pass is the sum of its
products, bytes of a token are those of a hand count, memory is read once in every way, and answers that differ are counted. Whole
runs are made on a tiny model, without the peer. Tolerance: floats of a few products to 1e-9; times are not looked at.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
try:
    decode: Any = importlib.import_module("bench.decode")
    gemm: Any = importlib.import_module("bench.gemm")
    harness: Any = importlib.import_module("bench.harness")
    limits: Any = importlib.import_module("bench.limits")
    passes: Any = importlib.import_module("bench.passes")
    prefill: Any = importlib.import_module("bench.prefill")
    shapes: Any = importlib.import_module("bench.shapes")
finally:
    sys.path.remove(str(ROOT))

needs_compiler = pytest.mark.skipif(shutil.which(limits.compiler()) is None, reason="no C compiler here")

PRINTED = """\
peak of this core: vpdpbusd 400 GMAC/s, f32 fma 59.1 GMAC/s, reading memory 15.1 GB/s
avx512  matmul Q8_0  3584 x 1024 cold T=1      9.4 GB/s      8.9 GMAC/s ( 3.7 %)
avx512  matmul Q8_0  3584 x 1024 cold T=512    0.2 GB/s    186.7 GMAC/s (46.7 %)
scalar  matmul Q4_0  1024 x 3584 cold T=64     1.3 GB/s      1.2 GMAC/s
"""


# ---- products


def test_what_bench_kernels_prints() -> None:
    output = gemm.parse(PRINTED)
    assert (output.peak, output.fma, output.read) == pytest.approx((400e9, 59.1e9, 15.1e9))
    assert output.products == [
        gemm.Product("avx512", "Q8_0", (3584, 1024), 1, pytest.approx(8.9e9)),
        gemm.Product("avx512", "Q8_0", (3584, 1024), 512, pytest.approx(186.7e9)),
        gemm.Product("scalar", "Q4_0", (1024, 3584), 64, pytest.approx(1.2e9)),
    ]


@pytest.mark.parametrize("text", ["", PRINTED.split("\n", 1)[1], PRINTED + "avx512  attend F16 dim 256\n", PRINTED + "\n"])
def test_other_output_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="bench_kernels printed"):
        gemm.parse(text)


def test_a_pass_is_the_sum_of_its_products() -> None:
    runs = [
        gemm.Output(peak, 1.0, 1.0, [gemm.Product("avx2", "Q8_0", (64, 32), 2, a), gemm.Product("avx2", "Q8_0", (128, 32), 2, b)])
        for peak, a, b in ((10e9, 1e9, 2e9), (20e9, 4e9, 4e9))
    ]
    book = harness.Book()
    facts = gemm.add_rows(book, "Q8_0", {(64, 32): 3, (128, 32): 1}, [2], runs)
    assert book.row("Q8_0, 64 x 32 (3 a pass)", "T=2").samples == pytest.approx((4096 / 1e9, 4096 / 4e9))
    row = book.row("Q8_0, all products of a pass", "T=2")
    assert row.samples == pytest.approx((3 * 4096 / 1e9 + 8192 / 2e9, 5 * 4096 / 4e9))
    assert row.stands_for == {"macs": 5 * 4096}
    rates = [5 * 4096 / s for s in row.samples]
    assert facts["q8_0_pass_2_gmac_s"] == pytest.approx(sum(rates) / 2 / 1e9)
    assert facts["q8_0_pass_2_share_of_vpdpbusd"] == pytest.approx((rates[0] / 10e9 + rates[1] / 20e9) / 2)


def test_matrices_of_a_pass_are_those_of_the_layers(tmp_path: Path) -> None:
    assert gemm.matrices("qwen35-0.8b-q8_0", None) == {
        "Q8_0": {
            (6144, 1024): 18, (2048, 1024): 18, (1024, 2048): 24, (3584, 1024): 48, (1024, 3584): 24, (4096, 1024): 6,
            (512, 1024): 12,
        }
    }  # fmt: skip
    path = shapes.shape_model("llama-tiny-q4_k", tmp_path)
    assert gemm.matrices(str(path), str(tmp_path)) == gemm.matrices("llama-tiny-q4_k", None)
    assert gemm.matrices("llama-tiny-f16", None) == {}


# ---- bytes of a token


def test_bytes_of_a_token_by_hand() -> None:
    info = SimpleNamespace(packed_bytes=1000, recurrent_bytes=50, kv_bytes_per_token=7)
    tensors = [
        SimpleNamespace(name="token_embd.weight", type="F16", dims=(4, 8), data_bytes=64),
        SimpleNamespace(name="output.weight", type="F16", dims=(4, 8), data_bytes=64),
        SimpleNamespace(name="blk.0.attn_q.weight", type="Q8_0", dims=(32, 8), data_bytes=272),
        SimpleNamespace(name="blk.0.attn_k.weight", type="F32", dims=(4, 2), data_bytes=32),
        SimpleNamespace(name="blk.0.attn_norm.weight", type="F32", dims=(4,), data_bytes=16),
        SimpleNamespace(name="blk.0.ssm_conv1d.weight", type="F32", dims=(4, 6), data_bytes=96),
    ]
    assert decode.token_bytes(info, tensors, 10) == 1000 + 64 + 32 + 100 + 70
    del tensors[1]  # then the embedding is the output matrix as well
    assert decode.token_bytes(info, tensors, 0) == 1000 + 64 + 32 + 100


# ---- limits


@needs_compiler
def test_every_way_to_read_reads_all_of_it_once() -> None:
    memory = mmap.mmap(-1, 3 * 4096 * 8 + 100)
    words = np.frombuffer(memory, np.uint64, count=3 * 4096)
    words[:] = np.random.default_rng(5).integers(0, 2**63, len(words), np.uint64)
    view = memoryview(memory)
    with limits.Limits() as found:
        for threads in (1, 2, 3):
            assert found.reading(view, threads).n_bytes == 3 * 4096 * 8
            for way in range(found._lib.bench_read_ways()):
                read = found.reading_by(way, view, threads)
                read()
                assert read.sum == int(words.sum())
        rate = found.vpdpbusd(1, 0.01)
        assert (rate > 0) == ("avx512_vnni" in harness.machine_facts()["flags"])


def test_a_compiler_that_fails_is_an_expected_error() -> None:
    with pytest.raises(limits.BuildError, match="does not run"):
        limits.compiled(["/nowhere/cc"])
    with pytest.raises(harness.BenchError, match="no such input"):
        limits.compiled([sys.executable, "-c", "raise SystemExit('no such input')"])


# ---- answers


class FakeSession:
    def __init__(self, *logits: float) -> None:
        self._logits = np.array(logits, np.float32)

    def logits(self) -> Any:
        return self._logits

    def logprobs(self, ids: list[int]) -> Any:
        return (self._logits - np.log(np.exp(self._logits).sum()))[ids]

    def top(self, k: int) -> Any:
        ids = np.argsort(-self._logits)[:k]
        return ids, self.logprobs(list(ids))


def test_answers_that_differ_are_counted() -> None:
    agreement = passes.Agreement(peer_must_agree=True)
    agreement.ours("a", FakeSession(1, 2))
    agreement.ours("b", FakeSession(2, 1))
    agreement.ours("a", FakeSession(1, 2))
    for token in (0, 1, 2):  # the likeliest, nearly as likely, far from it
        agreement.peer(FakeSession(3, 2.9, 1), token)
    ours, peer = agreement.checks("equal")
    assert (ours.n, ours.failed, peer.n, peer.failed) == (3, 0, 3, 1)
    assert agreement.facts() == {"peer_said_the_same": "1 of 3"}
    agreement.ours("b", FakeSession(2, 1.0000001))
    assert agreement.checks("equal")[0].failed == 1
    random = passes.Agreement(peer_must_agree=False)
    random.peer(FakeSession(3, 2), 1)
    assert len(random.checks("equal")) == 1


# ---- command line and whole runs


def test_several_models_and_threads() -> None:
    parser = passes.parser("")
    assert parser.parse_args([]).model == list(passes.MODELS) and parser.parse_args([]).threads == [1, 2]
    args = parser.parse_args(["--model", "a,b", "--model", "c", "--threads", "4"])
    assert (args.model, args.threads) == (["a", "b", "c"], [4])
    assert parser.parse_args(["--model", "a"]).model == ["a"]  # nothing is left of an earlier parse
    with pytest.raises(SystemExit):
        parser.parse_args(["--threads", "1,0"])


def _run(bench: Any, tmp_path: Path, *words: str) -> dict[str, Any]:
    options = ["--quick", "--no-peer", "--out", str(tmp_path / "out"), "--host-kind", "here", "--cache-dir", str(tmp_path)]
    threads = ["--threads", "1,2" if len(os.sched_getaffinity(0)) > 1 else "1"]
    assert bench.main([*options, *threads, "--model", "qwen35-tiny-q8_0", *words]) == 0
    (path,) = (tmp_path / "out").iterdir()
    data: dict[str, Any] = json.loads(path.read_text())
    assert all(check["failed"] == 0 and check["n"] for check in data["checks"])
    return data


@needs_compiler
def test_prefill_runs(tmp_path: Path) -> None:
    data = _run(prefill, tmp_path, "--tokens", "40,9")
    assert data["bench"] == "prefill-qwen35-tiny-q8_0"
    assert {"prefill_40_gmac_s_1t", "prefill_9_tokens_s_1t"} <= set(data["facts"])


@needs_compiler
def test_decode_runs(tmp_path: Path) -> None:
    data = _run(decode, tmp_path, "--tokens", "70", "--steps", "3")
    assert data["bench"] == "decode-qwen35-tiny-q8_0"
    assert {"decode_gb_s_1t", "plain_read_gb_s_1t", "decode_share_of_read_1t"} <= set(data["facts"])

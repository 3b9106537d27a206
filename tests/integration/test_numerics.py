"""Property: the bits are the contract. Golden hashes of flat images hold on every tier, in a process whose C library takes
its paths without FMA, and after an object linked with -ffast-math has switched the thread to flush-to-zero.

Tolerance: none. tests/data/golden.json is per GEIST_NUMERICS; a change that moves a bit raises that number and writes it anew:

    python tests/integration/test_numerics.py > tests/data/golden.json
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from geist_pool.engine import NUMERICS, Engine, Model, Session, available_tiers

DATA = Path(__file__).parent.parent / "data"
MODELS = (
    "llama-tiny-q8_0",
    "llama3rope-tiny-f32",
    "qwen3-tiny-q8_0",
    "qwen35-tiny-q8_0",
    "qwen35-tiny-gqa-f32",
    "qwen35-kq-q8_0",
    "qwen35-kq-q4_k_m",
    "qwen35-kq-q6_k",
    "gemma3-tiny-f32",
    "gemma3-tiny-q8_0",
)


def hashes(tier: str) -> dict[str, str]:
    """SHA-256 of each model's flat image without its header page, after 150 tokens; f16 KV."""
    out = {}
    with tempfile.TemporaryDirectory() as cache, Engine(tier=tier) as engine:
        for stem in MODELS:
            path = DATA / "oracle" / "models" / stem.rsplit("-", 1)[0] / f"{stem}.gguf"
            with Model(engine, path, cache_dir=cache) as model, Session(model) as session:
                session.prefill(np.random.default_rng(7).integers(0, 497, 150))
                out[stem] = hashlib.sha256(bytes(session.snapshot())[4096:]).hexdigest()
    return out


CHILD = f"""
import ctypes, json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
if sys.argv[2:]:
    lib = ctypes.CDLL(sys.argv[2])
    assert lib.flushes(), "the fast-math object did not switch this thread to flush-to-zero"
import test_numerics
print(json.dumps(test_numerics.hashes(sys.argv[1])))
if sys.argv[2:]:
    assert lib.flushes(), "the engine did not put the caller's floating-point environment back"
"""


def golden() -> dict[str, str]:
    kept = json.loads((DATA / "golden.json").read_text())
    assert kept["numerics"] == NUMERICS, "bits moved: write tests/data/golden.json anew"
    return kept["images"]


def child(tier: str, *arguments: str, **environment: str) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, tier, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("tier", available_tiers())
def test_golden(tier: str) -> None:
    assert hashes(tier) == golden()


@pytest.mark.parametrize("tier", available_tiers())
def test_without_the_c_librarys_fma(tier: str) -> None:
    """glibc's exp, log, sin and others return other bits when FMA is masked; the engine uses none of them."""
    assert child(tier, GLIBC_TUNABLES="glibc.cpu.hwcaps=-FMA,-AVX2_Usable,-AVX2,-FMA4") == golden()


@pytest.mark.parametrize("tier", available_tiers())
def test_after_a_fast_math_object(tier: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed to build this package, and this test"
    source = tmp_path / "fast.c"
    # reads a denormal times one: zero under FTZ/DAZ
    source.write_text("int flushes(void) { volatile float tiny = 1e-40f, one = 1.0f; return tiny * one == 0.0f; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-ffast-math", str(source), "-o", str(tmp_path / "fast.so")], check=True)
    assert child(tier, str(tmp_path / "fast.so")) == golden()


if __name__ == "__main__":
    print(json.dumps({"numerics": NUMERICS, "images": hashes("scalar")}, indent=1))

"""Property: logits of the fixture models are those of the references in tests/data/oracle (SOURCES.md).

Tolerances: F32 files with f32 KV within 1e-3 of the float reference (both are float32 in another order of sums; a wrong
convention costs 1e-1 and more). Quantised files (Q8_0, Q6_K, Q4_K_M) have activations rounded to 8 bits, so the distance to the
float reference, in rms, is held against that of llama.cpp, which rounds them too: at most 1.25 x at 17 and 130 tokens,
2.5 x at 1 token. Token ids:
equal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from geist_pool.engine import Engine, Model, Session
from geist_pool.text.tokenizer import Tokenizer

ORACLE = Path(__file__).parent.parent / "data" / "oracle"
STEMS = sorted(p.stem for p in ORACLE.glob("models/*/*.gguf"))
REPORT = json.loads((ORACLE / "refs" / "report.json").read_text())


def path_of(stem: str) -> Path:
    return ORACLE / "models" / stem.rsplit("-", 1)[0] / f"{stem}.gguf"


def all_logits(model: Model, tokens: np.ndarray) -> np.ndarray:
    """[len(tokens), n_vocab], one token at a time."""
    with Session(model, kv_type="f32") as session:
        rows = []
        for token in tokens:
            session.decode(int(token))
            rows.append(session.logits())
    return np.stack(rows)


def rms(a: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(a, dtype=np.float64))))


def test_fixtures_are_there() -> None:
    assert len(STEMS) == 18


@pytest.mark.parametrize("stem", STEMS)
def test_logits(stem: str, tmp_path: Path) -> None:
    refs = np.load(ORACLE / "refs" / f"{stem}.npz")
    with Engine() as engine, Model(engine, path_of(stem), cache_dir=tmp_path) as model:
        for n in (1, 17, 130):
            got, wanted = all_logits(model, refs[f"tokens_{n}"]), refs[f"hf_{n}"]
            if stem.endswith("-f32"):
                assert np.abs(got - wanted).max() <= 1e-3, n
            else:
                distance = rms(got - wanted) / rms(wanted)
                theirs = REPORT[stem][f"hf vs llama, {n} tokens"]["rms_rel"]
                assert distance <= theirs * (2.5 if n == 1 else 1.25), (n, distance, theirs)


@pytest.mark.parametrize("stem", [s for s in STEMS if s.endswith("-f32")])
def test_greedy_continuation(stem: str, tmp_path: Path) -> None:
    """The reference's greedy tokens, up to the first step where its own lead is below the logits' tolerance."""
    refs = np.load(ORACLE / "refs" / f"{stem}.npz")
    with Engine() as engine, Model(engine, path_of(stem), cache_dir=tmp_path) as model, Session(model, kv_type="f32") as session:
        session.prefill(refs["tokens_17"])
        for wanted, margin in zip(refs["greedy_17"], refs["greedy_margin_17"], strict=True):
            if margin < 2e-3:
                break
            token = session.sample()
            assert token == wanted
            session.decode(token)


@pytest.mark.parametrize("name", sorted({s.rsplit("-", 1)[0] for s in STEMS}))
def test_token_ids(name: str, tmp_path: Path) -> None:
    cases = json.loads((ORACLE / "refs" / f"{name}-tokenizer.json").read_text())
    with Engine() as engine, Model(engine, path_of(f"{name}-q8_0"), cache_dir=tmp_path) as model:
        tokenizer = Tokenizer(model.vocabulary())
    assert len(cases) >= 60
    for case in cases:
        wanted = case["ids"] if "ids" in case else case["llama_ids"]  # sentencepiece parses no control tokens
        assert tokenizer.encode(case["text"], special=case["parse_special"]) == wanted, case["text"]

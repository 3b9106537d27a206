"""Properties of models with random weights: the engine takes every weight type of both architectures and gives finite logits that
differ from prompt to prompt, any text survives the vocabulary, Qwen3.5-0.8B has its published size, and a file is made once,
again where it was cut off, and from the same bytes each time. Tolerance: spreads are held within a factor of two of what is
drawn, which says that blocks are what their format means; what the model says is nobody's concern.
"""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geist_pool.engine import Engine, Gguf, Model, Session
from geist_pool.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
try:
    shapes: Any = importlib.import_module("bench.shapes")
    harness: Any = importlib.import_module("bench.harness")
finally:
    sys.path.remove(str(ROOT))

TEXT = "Nip broke the window by the stairs.\n\n  Zürich, naïve café: 12345 + x_y! 素早い狐 Быстрая лиса 😀"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


@pytest.mark.parametrize("kind", list(shapes.FORMATS))
@pytest.mark.parametrize("shape", ["qwen35-tiny", "llama-tiny"])
def test_every_type_runs(shape: str, kind: str, cache: Path) -> None:
    path = shapes.shape_model(f"{shape}-{kind}", cache)
    with Engine() as engine, Model(engine, path, cache_dir=cache) as model, Session(model, n_ctx=64) as session:
        types = {t.type.lower() for t in model.gguf.tensors()}
        tokenizer = Tokenizer(model.vocabulary())
        ids = tokenizer.encode(TEXT, special=False)[:40]
        seen = []
        for n in (1, 20, 40):
            session.reset()
            session.prefill(ids[:n])
            logits = session.logits()
            assert np.isfinite(logits).all()
            assert 1 < logits.std() < 4  # drawn for 2
            seen.append(int(logits.argmax()))
    assert types == {kind, "f32"}
    assert len(set(seen)) > 1 or len(set(ids)) == 1


@pytest.mark.parametrize("kind", list(shapes.FORMATS))
def test_weights_have_the_spread_that_was_asked_for(kind: str, cache: Path) -> None:
    width = shapes.FORMATS[kind].width
    data = shapes.draw(np.random.default_rng(1), kind, 256 * 100, 0.5)
    assert len(data) == 256 * 100 // width * shapes.FORMATS[kind].size
    if kind in ("f32", "f16", "q8_0"):
        if kind == "q8_0":
            blocks = np.frombuffer(data, [("d", "<f2"), ("q", "i1", 32)])
            values = blocks["q"].astype(np.float32) * blocks["d"].astype(np.float32)[:, None]
            assert blocks["q"].min() == -127
        else:
            values = np.frombuffer(data, "<f4" if kind == "f32" else "<f2").astype(np.float32)
        assert abs(float(values.mean())) < 0.02
        assert float(values.std()) == pytest.approx(0.5, rel=0.05)


def test_any_text_survives_and_known_words_are_one_token(cache: Path) -> None:
    path = shapes.shape_model("qwen35-tiny-q8_0", cache)
    with Engine() as engine, Gguf(engine, path) as gguf, Model(engine, path, cache_dir=cache) as model:
        assert gguf.get("general.architecture") == "qwen35"
        tokenizer = Tokenizer(model.vocabulary())
    for text in (TEXT, "", " ", "\n\n\n", "\x00\x7f", "the of and to in"):
        assert tokenizer.decode_bytes(tokenizer.encode(text, special=False), special=True) == text.encode()
    assert len(tokenizer.encode(" the of and to in", special=False)) == 5
    assert tokenizer.is_control(tokenizer.encode("<|im_end|>", special=True)[0])


def test_vocabularies_have_their_size_and_every_merge_is_of_tokens() -> None:
    tokens, types, merges = shapes.vocabulary(40_000)
    assert len(tokens) == len(types) == len(set(tokens)) == 40_000
    known = set(tokens)
    for merge in merges:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= known
    assert len(merges) == 40_000 - 256 - len(shapes.CONTROL)  # each is the way to one token


def test_the_08b_is_what_was_published() -> None:
    shape, kind = shapes.parse("qwen35-0.8b-q8_0")
    tensors = list(shapes.tensors(shape))
    assert len(tensors) == 320 and kind == "q8_0"
    assert sum(t.kind != "matrix" for t in tensors) == 133
    assert sum(t.weights for t in tensors) == 752_393_024


def test_names() -> None:
    assert {"qwen35-0.8b-q8_0", "qwen35-0.8b-q4_0", "llama-135m-q4_0", "qwen35-tiny-q6_k"} <= set(shapes.presets())
    for name in ("smollm2", "qwen35-0.8b", "qwen35-0.8b-q3_k", "llama-135m-q4_k", "q8_0", ""):
        assert not shapes.is_shape(name)
    with pytest.raises(ValueError, match="no whole blocks of 256"):
        shapes.parse("llama-135m-q4_k")
    for shape in shapes.SHAPES:
        assert shape in shapes.describe(shape)


def test_made_once_and_again_where_it_is_not_whole(tmp_path: Path) -> None:
    path = shapes.shape_model("llama-tiny-q4_0", tmp_path)
    data, before = path.read_bytes(), path.stat().st_mtime_ns
    out = io.BytesIO()
    shapes.write(out, "llama-tiny-q4_0")
    assert out.getvalue() == data
    assert shapes.shape_model("llama-tiny-q4_0", tmp_path) == path and path.stat().st_mtime_ns == before
    path.write_bytes(data[:-1])
    assert shapes.shape_model("llama-tiny-q4_0", tmp_path).read_bytes() == data
    path.with_suffix(".stamp").write_text("of another recipe\n")
    shapes.shape_model("llama-tiny-q4_0", tmp_path)
    assert path.stat().st_mtime_ns != before
    assert sorted(p.name for p in path.parent.iterdir()) == ["llama-tiny-q4_0.gguf", "llama-tiny-q4_0.stamp"]


def test_benches_take_the_names(tmp_path: Path) -> None:
    path, cache = harness.fetched_model("llama-tiny-q4_0", str(tmp_path))
    assert (path, cache) == (tmp_path / "shapes" / "llama-tiny-q4_0.gguf", tmp_path)
    assert path.is_file()

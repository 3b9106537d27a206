"""Property: one answer. prefill(a + b) equals prefill(a), snapshot, restore in another session or another process,
prefill(b): logits and state compared as bytes of flat images, over random models, tokens, cuts, threads 1 to 3 and every tier
of this machine.

Tolerance: none. A replay must be exact, and a retry on another worker invisible. The seed of a failing example is printed by
hypothesis."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from geist_pool.engine import Engine, Model, Session, available_tiers
from geist_pool.errors import ImageDamaged, ImageMismatch
from geist_pool.protocol import Sampling

MODELS = ("llama-tiny", "qwen3-tiny", "qwen35-tiny", "qwen35-tiny-gqa", "gemma3-tiny")
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

prompts = st.lists(st.integers(0, 496), min_size=1, max_size=180)
model_names = st.sampled_from(MODELS)
ways = st.tuples(st.sampled_from(available_tiers()), st.integers(1, 3))

Load = Callable[..., Model]


@pytest.fixture(scope="module")
def load(tiny_model: Callable[..., Path], packed_dir: Path) -> Iterator[Load]:
    """load(name, tier="scalar", threads=1): each model once per tier and thread count."""
    opened: list[Engine | Model] = []

    @functools.cache
    def get(name: str, tier: str = "scalar", threads: int = 1) -> Model:
        engine = Engine(tier=tier, threads=threads)
        assert engine.tier == tier
        opened.append(engine)
        model = Model(engine, tiny_model(name), cache_dir=packed_dir)
        opened.append(model)
        return model

    yield get
    for thing in reversed(opened):
        thing.close()


def image_of(model: Model, tokens: list[int]) -> bytes:
    """The reference: one prefill in a fresh session."""
    with Session(model) as session:
        session.prefill(tokens)
        return bytes(session.snapshot())


def test_every_tier_is_tested() -> None:
    """Says which tiers ran; scalar is always there."""
    print("tiers:", ", ".join(available_tiers()))
    assert "scalar" in available_tiers()


@SETTINGS
@given(name=model_names, tokens=prompts, way=ways, data=st.data())
def test_cuts_tiers_threads_restores(load: Load, name: str, tokens: list[int], way: tuple[str, int], data: st.DataObject) -> None:
    """FINDINGS rows 1 and 6: any cut, in a session that held another prompt, equals a fresh worker's single prefill."""
    wanted = image_of(load(name), tokens)
    model = load(name, *way)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=4)) | {len(tokens)})
    with Session(model) as session, Session(model) as second:
        second.prefill(data.draw(prompts))
        start = 0
        for cut in cuts:
            session.prefill(tokens[start:cut])
            image = session.snapshot()
            second.restore(image)
            assert np.array_equal(session.logits(), second.logits())
            session, second, start = second, session, cut
        assert bytes(session.snapshot()) == wanted


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 700])
def test_exact_to_the_token(load: Load, name: str, length: int) -> None:
    """FINDINGS row 7: prefixes of any length are reused whole; a suffix of no token works through the saved pending logits."""
    tokens = np.random.default_rng(length).integers(0, 497, length + 3)
    model = load(name, available_tiers()[-1])
    with Session(model) as a, Session(model) as b, Session(model) as fresh:
        a.prefill(tokens[:length])
        b.restore(a.snapshot())
        assert b.position == length
        assert np.array_equal(a.logits(), b.logits())  # no token prefilled after the restore
        assert a.sample() == b.sample()
        b.prefill(tokens[length:])
        fresh.prefill(tokens)
        assert bytes(b.snapshot()) == bytes(fresh.snapshot())


CHILD = """
import sys
from pathlib import Path
import numpy as np
from geist_pool.engine import Engine, Model, Session
path, cache, work, tier, threads = sys.argv[1:]
work = Path(work)
with Engine(tier=tier, threads=int(threads)) as engine, Model(engine, path, cache_dir=cache) as model, Session(model) as session:
    for job in sorted(work.glob("*.npy")):
        session.restore(job.with_suffix(".image").read_bytes())
        rest = np.load(job)
        if len(rest):
            session.prefill(rest)
        job.with_suffix(".out").write_bytes(session.snapshot())
"""


@pytest.mark.parametrize("name", MODELS)
def test_another_process(load: Load, tiny_model: Callable[..., Path], packed_dir: Path, tmp_path: Path, name: str) -> None:
    """The same in other processes, one for every tier, with one to three threads."""
    random = np.random.default_rng(MODELS.index(name))
    wanted: dict[str, bytes] = {}
    for i in range(8):
        tokens = random.integers(0, 497, random.integers(1, 180))
        cut = int(random.integers(1, len(tokens) + 1))
        with Session(load(name)) as session:
            session.prefill(tokens[:cut])
            (tmp_path / f"{i}.image").write_bytes(session.snapshot())
        np.save(tmp_path / f"{i}.npy", tokens[cut:])
        wanted[f"{i}.out"] = image_of(load(name), tokens.tolist())
    for threads, tier in enumerate(available_tiers(), 1):
        arguments = [str(tiny_model(name)), str(packed_dir), str(tmp_path), tier, str(threads)]
        subprocess.run([sys.executable, "-c", CHILD, *arguments], check=True, timeout=120)
        for out, image in wanted.items():
            assert (tmp_path / out).read_bytes() == image, (tier, out)
            (tmp_path / out).unlink()


@SETTINGS
@given(name=model_names, tokens=prompts, data=st.data())
def test_damaged_images_are_refused_whole(load: Load, name: str, tokens: list[int], data: st.DataObject) -> None:
    """FINDINGS rows 4 and 8: an image is all or nothing. Flipped or cut anywhere that matters it is refused, the session does
    not move by a byte, and the next sound restore is right."""
    model = load(name, available_tiers()[-1])
    with Session(model) as source, Session(model) as session:
        source.prefill(tokens)
        image = bytes(source.snapshot())
        session.prefill(data.draw(prompts))
        before = bytes(session.snapshot())
        cut = data.draw(st.integers(0, len(image) - 1))
        with pytest.raises(ImageDamaged):
            session.restore(image[:cut])
        flipped = bytearray(image)
        at = data.draw(st.integers(0, len(image) - 1))
        flipped[at] ^= 1 << data.draw(st.integers(0, 7))
        try:
            session.restore(flipped)
        except (ImageDamaged, ImageMismatch):
            assert bytes(session.snapshot()) == before
        else:
            # padding between regions holds nothing; what came back is the sound image
            assert bytes(session.snapshot()) == image
        session.restore(image)
        assert bytes(session.snapshot()) == image


@SETTINGS
@given(name=model_names, tokens=prompts, label=st.lists(st.integers(0, 496), min_size=1, max_size=20), way=ways)
def test_scores(load: Load, name: str, tokens: list[int], label: list[int], way: tuple[str, int]) -> None:
    """FINDINGS rows 11, 12, 13: a label's values are log-softmax over the whole vocabulary at exactly its tokens, each <= 0,
    the same numbers that generating it reports; the raw values come back one by one, so sum and mean are the caller's to
    take."""
    model = load(name, *way)
    with Session(model) as session, Session(load(name)) as forced:
        session.prefill(tokens)
        forced.prefill(tokens)
        before = bytes(session.snapshot())
        scores = session.score(label)
        assert len(scores) == len(label)
        for value, token in zip(scores, label, strict=True):
            logits = forced.logits().astype(np.float64)
            exact = logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            assert value == forced.logprobs([token])[0] <= 0
            assert value == pytest.approx(exact, abs=1e-5)
            forced.decode(token)
        assert bytes(session.snapshot()) == before
        assert np.exp(session.logprobs(np.arange(512)).astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)


@SETTINGS
@given(
    name=model_names,
    tokens=prompts,
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        top_k=st.sampled_from([0, 5]),
        top_p=st.sampled_from([1.0, 0.8]),
        min_p=st.sampled_from([0.0, 0.05]),
        repeat_penalty=st.sampled_from([1.0, 1.3]),
        seed=st.integers(0, 2**63 - 1),
        stream=st.integers(0, 5),
    ),
    way=ways,
)
def test_sampling_is_replayable(load: Load, name: str, tokens: list[int], sampling: Sampling, way: tuple[str, int]) -> None:
    """Draws depend on seed, stream and position: a restore in the middle, another tier and other threads give the same tokens."""

    def continue_(session: Session, n: int) -> list[int]:
        out = []
        for _ in range(n):
            out.append(session.sample())
            session.decode(out[-1])
        return out

    with Session(load(name)) as a, Session(load(name, *way)) as b:
        a.prefill(tokens)
        a.set_sampler(sampling)
        first = continue_(a, 6)
        image = a.snapshot()
        b.restore(image)  # the sampler is in the image
        assert continue_(b, 6) == continue_(a, 6)
        b.reset()
        b.prefill(tokens)
        b.set_sampler(sampling)
        assert continue_(b, 6) == first


def test_image_of_another_model(load: Load) -> None:
    """FINDINGS row 2: what does not fit is a refusal, never a hit."""
    with Session(load("qwen35-tiny")) as a, Session(load("qwen35-tiny-gqa")) as b:
        a.prefill([1, 2, 3])
        b.prefill([4, 5])
        before = bytes(b.snapshot())
        with pytest.raises(ImageMismatch, match="another model"):
            b.restore(a.snapshot())
        assert bytes(b.snapshot()) == before
    with Session(load("llama-tiny"), kv_type="f32") as a, Session(load("llama-tiny")) as b:
        a.prefill([1, 2, 3])
        with pytest.raises(ImageMismatch, match="f32"):
            b.restore(a.snapshot())

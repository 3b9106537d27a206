"""The engine through its binding.

Property: decode after restore, attach or fork equals decode without, in every bit of logits and state; the parent of a fork does
not move; whatever is refused leaves the session byte for byte as it was; borrowed memory cannot be unmapped; packed weights are
made once, shared, and made anew when damaged. Tolerance: none, all are equalities. Reason: the pool serves any request on any
worker, and its answers must not show it.
"""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from geist_pool.engine import KV_BLOCK, NUMERICS, Engine, Gguf, Image, Model, Session, available_tiers
from geist_pool.errors import (
    BadRequest,
    EngineError,
    GeistPoolError,
    ImageDamaged,
    ImageMismatch,
    ModelError,
    NonFinite,
    TooLong,
    Unsupported,
)
from geist_pool.protocol import Sampling
from geist_pool.store import layout

MODELS = ["llama-tiny", "qwen3-tiny", "qwen35-tiny", "qwen35-tiny-gqa"]
TinyModel = Callable[..., Path]


def ids(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, n).tolist()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(threads=2) as e:
        yield e


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, engine: Engine, tiny_model: TinyModel, packed_dir: Path) -> Iterator[Model]:
    with Model(engine, tiny_model(request.param), cache_dir=packed_dir) as m:
        yield m


@pytest.fixture
def llama(engine: Engine, tiny_model: TinyModel, packed_dir: Path) -> Iterator[Model]:
    with Model(engine, tiny_model("llama-tiny"), cache_dir=packed_dir) as m:
        yield m


def pages(n: int) -> mmap.mmap:
    """Page-aligned memory, as shared memory is."""
    return mmap.mmap(-1, max(n, 1))


def thin(session: Session) -> tuple[mmap.mmap, mmap.mmap | None]:
    """The session as a thin image and its blocks."""
    geometry = session.model.geometry(session.kv_type)
    image = pages(session.snapshot_thin_size)
    session.snapshot_thin(image)
    n = session.position // KV_BLOCK
    if n == 0:
        return image, None
    kv = pages(n * geometry.kv_block_bytes)
    session.snapshot_blocks(0, n, kv)
    return image, kv


# ---- one answer


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
def test_restore_and_attach_continue_as_if_nothing_had_been(model: Model, n: int) -> None:
    prompt, more = ids(n), ids(70, seed=1)
    with Session(model) as one, Session(model) as restored, Session(model) as attached:
        one.prefill(prompt)
        restored.prefill(ids(30, seed=9))  # what was before leaves no trace
        restored.restore(one.snapshot())
        image, kv = thin(one)
        attached.prefill(ids(100, seed=8))
        attached.attach(image, [kv] if kv else [])
        for other in (restored, attached):
            assert other.position == n
            assert other.tokens.tolist() == prompt
            assert (other.logits() == one.logits()).all()
            assert other.snapshot() == one.snapshot()
        for session in (one, restored, attached):
            session.prefill(more)
        for other in (restored, attached):
            assert (other.logits() == one.logits()).all()
            assert other.snapshot() == one.snapshot()


def test_no_cut_of_the_prompt_shows(model: Model) -> None:
    prompt = ids(150)
    with Session(model) as whole, Session(model) as cut:
        whole.prefill(prompt)
        for size in (1, 7, 64, 100):
            cut.reset()
            for start in range(0, len(prompt), size):
                cut.prefill(prompt[start : start + size])
            assert cut.snapshot() == whole.snapshot()


def test_a_forks_parent_does_not_move(model: Model) -> None:
    with Session(model) as parent:
        parent.prefill(ids(130))
        before, logits = parent.snapshot(), parent.logits()
        with parent.fork() as fork, parent.fork() as second:
            fork.prefill(ids(80, seed=2))
            second.decode(5)
            assert parent.snapshot() == before
            assert (parent.logits() == logits).all()
            parent.decode(5)
            assert parent.snapshot() == second.snapshot()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tier", ["scalar", "avx2", "avx512"])
def test_every_tier_gives_the_same_bits(tiny_model: TinyModel, packed_dir: Path, tier: str, threads: int) -> None:
    if tier not in available_tiers():
        pytest.skip(f"this machine lacks {tier}")

    def run(engine: Engine) -> bytearray:
        with Model(engine, tiny_model("qwen35-tiny"), cache_dir=packed_dir) as m, Session(m) as s:
            s.prefill(ids(100))
            s.decode(3)
            return s.snapshot()

    with Engine("scalar") as scalar, Engine(tier, threads) as other:
        assert other.tier == tier
        assert run(scalar) == run(other)


def test_score_is_teacher_forcing(model: Model) -> None:
    """The sum over exactly the label's tokens (FINDINGS rows 11 and 12)."""
    prompt, label = ids(70), ids(5, seed=3)
    with Session(model) as session, Session(model) as forced:
        session.prefill(prompt)
        before = session.snapshot()
        scores = session.score(label)
        assert session.snapshot() == before, "scoring moved the session"
        forced.prefill(prompt)
        for token, score in zip(label, scores, strict=True):
            assert forced.logprobs([token])[0] == score
            forced.decode(token)


def test_logprobs_are_a_distribution(llama: Model) -> None:
    with Session(llama) as session:
        session.prefill(ids(20))
        every = session.logprobs(np.arange(llama.info.n_vocab))
        assert every.max() <= 0
        assert abs(np.exp(every.astype(np.float64)).sum() - 1) < 1e-5  # float32 rounding of 512 terms
        top_ids, top = session.top(10)
        order = np.lexsort((np.arange(len(every)), -every))[:10]
        assert top_ids.tolist() == order.tolist()
        assert top.tolist() == every[order].tolist()
        assert session.sample() == top_ids[0], "the default is greedy"


def test_sampling_depends_on_seed_stream_and_position(llama: Model) -> None:
    def answer(seed: int, stream: int) -> list[int]:
        with Session(llama) as session:
            session.prefill(ids(20))
            session.set_sampler(Sampling(temperature=3.0, seed=seed, stream=stream))
            out = []
            for _ in range(20):
                out.append(session.sample())
                assert session.sample() == out[-1], "drawing twice at one position"
                session.decode(out[-1])
            return out

    assert answer(1, 0) == answer(1, 0)
    assert len({tuple(answer(seed, stream)) for seed in (1, 2) for stream in (0, 1)}) == 4


# ---- what is refused


def test_refused_calls_leave_the_session_as_it_was(llama: Model) -> None:
    with Session(llama, n_ctx=100) as session:
        session.prefill(ids(90))
        before = session.snapshot()
        with pytest.raises(TooLong) as caught:
            session.prefill(ids(11))
        assert caught.value.data["tokens"] == 101
        assert caught.value.data["limit"] == 100
        for bad in ([3, 512], [3, -1], [1 << 31], [3.5], [[3]], ["3"], []):
            with pytest.raises((BadRequest, EngineError)):
                session.prefill(bad)  # type: ignore[arg-type]
        with pytest.raises(TooLong):
            session.score(ids(11))
        assert session.snapshot() == before
        session.prefill(np.array(ids(10), np.int64))


def test_a_damaged_image_is_refused_and_harms_nothing(model: Model) -> None:
    """Every region cut and flipped (FINDINGS row 4)."""
    with Session(model) as source, Session(model) as session:
        source.prefill(ids(130))
        image = source.snapshot()
        session.prefill(ids(40, seed=5))
        before = session.snapshot()
        for at in [*range(0, 200, 8), *range(4096, len(image), 4096)]:
            image[at] ^= 4
            with pytest.raises((ImageDamaged, ImageMismatch)):
                session.restore(image)
            image[at] ^= 4
        for n in (0, 100, 4096, len(image) - 4096, len(image) - 1):
            with pytest.raises(ImageDamaged):
                session.restore(image[:n])
        assert session.snapshot() == before
        session.restore(image)
        assert session.snapshot() == image


def test_verify_notices_every_page(model: Model) -> None:
    with Session(model) as session:
        session.prefill(ids(200))
        image, kv = thin(session)
        assert kv is not None
        Image.verify(image, [kv])
        info = Image.inspect(image)
        assert (info.flat, info.n_tokens, info.numerics, info.kv_type) == (False, 200, NUMERICS, "f16")
        assert info.fingerprint == model.fingerprint
        assert info.tokens.tolist() == ids(200)
        found = Image.check(image, [kv], 0, fingerprint=model.fingerprint, kv_type="f16")
        assert found.tolist() == ids(200)
        for at in range(0, len(kv), 4096):
            kv[at] ^= 1
            with pytest.raises(ImageDamaged):
                Image.verify(image, [kv])
            Image.verify(image, [kv], first_block=200 // KV_BLOCK)  # taken as verified before
            kv[at] ^= 1
        # The first bytes of every region: pages that are padding only have no checksum.
        for at in [0, 4096, 8192]:
            image[at] ^= 1
            with pytest.raises(GeistPoolError):
                Image.verify(image, [kv])
            image[at] ^= 1


def test_images_of_another_model_or_kv_type_are_refused(
    engine: Engine, llama: Model, tiny_model: TinyModel, packed_dir: Path
) -> None:
    with (
        Model(engine, tiny_model("llama-tiny", "f32"), cache_dir=packed_dir) as other,
        Session(other) as stranger,
        Session(llama, kv_type="f32") as wide,
        Session(llama) as session,
    ):
        for source in (stranger, wide):
            source.prefill(ids(10))
            with pytest.raises(ImageMismatch):
                session.restore(source.snapshot())
            image, _ = thin(source)
            with pytest.raises(ImageMismatch):
                session.attach(image)
            with pytest.raises(ImageMismatch):
                Image.check(image, [], 0, fingerprint=llama.fingerprint, kv_type="f16")
        assert session.position == 0


def test_geometry_gives_every_size(model: Model) -> None:
    for kv_type in ("f16", "f32"):
        geometry = model.geometry(kv_type)
        with Session(model, kv_type=kv_type) as session:
            for n in (1, 62, 1, 1, 66, 200):
                session.prefill(ids(n))
                thin_bytes = layout.image_bytes(geometry, session.position)
                assert session.snapshot_thin_size == thin_bytes
                blocks = layout.whole_blocks(session.position)
                assert session.snapshot_size == thin_bytes + layout.kv_object_bytes(geometry, blocks)


def test_a_logit_that_is_not_finite_is_told(engine: Engine, nan_model: Path, tmp_path: Path) -> None:
    with Model(engine, nan_model, cache_dir=tmp_path) as model, Session(model) as session:
        session.prefill([3, 4])
        with pytest.raises(NonFinite):
            session.prefill([7])
        session.reset()
        session.prefill([3, 4])
        assert np.isfinite(session.logits()).all()


# ---- lifetimes


def test_attached_memory_cannot_be_unmapped(llama: Model) -> None:
    with Session(llama) as source, Session(llama) as session:
        source.prefill(ids(130))
        image, kv = thin(source)
        assert kv is not None
        session.attach(image, [kv])
        fork = session.fork()
        for mapping in (image, kv):
            with pytest.raises(BufferError):
                mapping.close()
        session.reset()
        for mapping in (image, kv):
            with pytest.raises(BufferError):
                mapping.close()  # the fork still reads it
        fork.decode(5)
        source.decode(5)
        assert fork.snapshot() == source.snapshot()
        fork.close()
        image.close()
        kv.close()


def test_things_close_in_order(tiny_model: TinyModel, packed_dir: Path) -> None:
    engine = Engine()
    model = Model(engine, tiny_model("llama-tiny"), cache_dir=packed_dir)
    session = Session(model)
    with pytest.raises(EngineError, match="still used"):
        model.close()
    with pytest.raises(EngineError, match="still used"):
        engine.close()
    session.close()
    session.close()
    with pytest.raises(EngineError, match="closed"):
        session.prefill([3])
    model.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        _ = engine.tier


def test_what_nobody_closed_goes_in_order_too(tiny_model: TinyModel, packed_dir: Path) -> None:
    session = Session(Model(Engine(), tiny_model("llama-tiny"), cache_dir=packed_dir))
    session.prefill([3])
    del session


# ---- files


def test_metadata_and_tensors(engine: Engine, tiny_model: TinyModel) -> None:
    with Gguf(engine, tiny_model("qwen35-tiny")) as gguf:
        assert gguf.get("general.architecture") == "qwen35"
        assert gguf.get("qwen35.block_count") == 8
        assert gguf.get("tokenizer.ggml.add_bos_token") is False
        assert gguf.get("no.such.key") is None
        assert isinstance(gguf.get("qwen35.rope.dimension_sections"), list)
        tokens = gguf.get("tokenizer.ggml.tokens")
        assert isinstance(tokens, list)
        assert len(tokens) == 512
        assert all(isinstance(t, bytes) for t in tokens)
        assert len(set(gguf.keys())) == len(gguf.keys())
        tensors = {t.name: t for t in gguf.tensors()}
        assert tensors["token_embd.weight"].dims == (64, 512)
        assert sum(t.data_bytes for t in tensors.values()) < tiny_model("qwen35-tiny").stat().st_size
        assert len(gguf.fingerprint()) == 64


def test_bytes_of_tokens_are_the_vocabularys(model: Model) -> None:
    vocabulary = model.vocabulary()
    for token in range(model.info.n_vocab):
        expected = b"" if vocabulary.is_control(token) else vocabulary.piece(token)
        assert model.token_bytes(token) == expected
    assert any(vocabulary.is_control(t) for t in range(model.info.n_vocab))


def test_files_that_are_no_model_are_refused(engine: Engine, tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf"):
        Model(engine, tmp_path / "none.gguf", cache_dir=tmp_path)
    whole = tiny_model("llama-tiny").read_bytes()
    for n in (0, 3, 100, 5000, len(whole) - 1):
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:n])
        with pytest.raises(ModelError):
            Model(engine, path, cache_dir=tmp_path)
    assert list(tmp_path.glob("packed/*.packed")) == []


def test_unknown_words_are_refused(llama: Model) -> None:
    with pytest.raises(Unsupported, match="tier"):
        Engine("sse9")
    with pytest.raises(Unsupported, match="KV type"):
        Session(llama, kv_type="q4")
    with pytest.raises(EngineError):
        Engine(threads=0)
    with pytest.raises(EngineError):
        Session(llama, n_ctx=1 << 20)


# ---- packed weights


@pytest.fixture
def own(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A model file that a test may change."""
    path = tmp_path / "own.gguf"
    path.write_bytes(tiny_model("llama-tiny").read_bytes())
    return path


def load(engine: Engine, path: Path, **options: bool) -> tuple[str, list[float]]:
    """Fingerprint, and logits after a fixed prompt."""
    with Model(engine, path, cache_dir=path.parent, **options) as m, Session(m) as s:
        s.prefill(ids(10))
        return m.fingerprint, s.logits().tolist()


def packed(path: Path) -> list[Path]:
    return sorted(p for p in (path.parent / "packed").iterdir() if p.is_file() and p.name != "lock")


def test_weights_are_packed_once(engine: Engine, own: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = load(engine, own)
    (file,) = packed(own)
    assert file.stat().st_mode & 0o777 == 0o600
    inode = file.stat().st_ino
    os.utime(own)  # touched: hashed again, not packed again
    for options in ({}, {}, {"verify": True}):
        assert load(engine, own, **options) == first
    assert [p.stat().st_ino for p in packed(own)] == [inode]
    assert sum("packing" in r.message for r in caplog.records) == 1


def test_verify_notices_what_size_and_time_hide(engine: Engine, own: Path) -> None:
    before, _ = load(engine, own)
    status = own.stat()
    with own.open("r+b") as f:
        f.seek(-100, os.SEEK_END)
        f.write(b"\1\2\3")
    os.utime(own, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert load(engine, own)[0] == before, "the same identity is believed"
    assert load(engine, own, verify=True)[0] != before
    assert len(packed(own)) == 2


def test_check_notices_a_flipped_weight(engine: Engine, own: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = load(engine, own)
    (file,) = packed(own)
    data = bytearray(file.read_bytes())
    good = bytes(data)
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    assert load(engine, own, check=True) == first
    assert packed(own)[0].read_bytes() == good
    assert any("made anew" in r.message for r in caplog.records)


@pytest.mark.parametrize("how", ["empty", "cut", "header", "other"])
def test_a_damaged_packed_file_is_made_anew(
    engine: Engine, own: Path, tiny_model: TinyModel, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    first = load(engine, own)
    (file,) = packed(own)
    data = bytearray(file.read_bytes())
    good = bytes(data)
    if how == "empty":
        data = bytearray()
    elif how == "cut":
        del data[-4096:]
    elif how == "header":
        data[20] ^= 1
    else:  # sound packed weights of another model with the same shapes
        other = own.parent / "other"
        other.mkdir()
        changed = bytearray(own.read_bytes())
        changed[-100:-97] = b"\1\2\3"
        (other / "own.gguf").write_bytes(changed)
        load(engine, other / "own.gguf")
        data = bytearray(packed(other / "own.gguf")[0].read_bytes())
    file.unlink()
    file.write_bytes(data)
    assert load(engine, own) == first
    assert file.read_bytes() == good
    assert [p for p in packed(own) if p.suffix != ".packed"] == []
    assert any("made anew" in r.message for r in caplog.records)


def test_processes_that_pack_at_once_get_one_file(own: Path) -> None:
    script = (
        "import sys; from geist_pool.engine import *\n"
        "with Engine() as e, Model(e, sys.argv[1], cache_dir=sys.argv[2]) as m: print(m.fingerprint)\n"
    )
    call = [sys.executable, "-c", script, str(own), str(own.parent)]
    running = [subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    results = [p.communicate() for p in running]
    assert len({out for out, _ in results}) == 1, results
    assert [err for _, err in results] == [""] * 4
    assert [p.suffix for p in packed(own)] == [".packed"]


def test_a_full_disk_is_an_error_and_leaves_nothing(own: Path) -> None:
    script = (
        "import resource, sys; from geist_pool.engine import *; from geist_pool.errors import EngineError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "with Engine() as e:\n"
        "    try: Model(e, sys.argv[1], cache_dir=sys.argv[2])\n"
        "    except EngineError as error: print(error)\n"
    )
    call = [sys.executable, "-c", script, str(own), str(own.parent)]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    assert "no room for" in done.stdout
    assert packed(own) == []


def test_what_a_killed_packer_left_goes(engine: Engine, own: Path) -> None:
    (own.parent / "packed").mkdir()
    (own.parent / "packed" / "1234.tmp").write_bytes(b"half")
    load(engine, own)
    assert [p.suffix for p in packed(own)] == [".packed"]

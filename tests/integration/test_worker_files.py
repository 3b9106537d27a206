"""Contexts as files, written and read by real workers.

Property: a context that was saved and loaded, into the same pool or another one, continues exactly as the first (FINDINGS row 5:
what was reused is told); a file that is cut, flipped, foreign or of another model is refused with a sentence, and nothing of it
is left in shared memory (row 4); whatever goes wrong while a file is written, the one of that name stays as it was. Tolerance:
none. Reason: files are kept for weeks and are the only thing here that a user may copy about.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

import msgspec
import pytest
from worker_kit import drop, expected, generate, ids

from geist_pool import protocol as p
from geist_pool.engine import Model
from geist_pool.store import files, layout, shm


def envelope_of(ref: p.ContextRef) -> p.Envelope:
    with shm.Mapping(ref.image, ref.image_bytes) as mapped:
        return layout.parse(mapped.view, what=ref.image).envelope


def envelope_for(n_tokens: int) -> p.Envelope:
    return p.Envelope("0000000000aa", None, "default", None, 0.0, None, False, n_tokens, 0, layout.whole_blocks(n_tokens))


def save(broker, worker, path: Path, chain: p.Chain) -> p.Done:
    return broker.run(worker, p.SaveWork(str(path), envelope_of(chain[-1])), chain)


@pytest.mark.parametrize("n", [1, 63, 64, 200])
def test_a_saved_context_comes_back(paper_broker, model: Model, tmp_path: Path, n: int) -> None:
    broker = paper_broker()
    worker, other = broker.start(), broker.start(tier="scalar")
    path = tmp_path / "a"
    chain = broker.create(worker, ids(n))
    done = save(broker, worker, path, chain)
    assert done.result == p.SaveDone(path.stat().st_size)
    assert path.stat().st_mode & 0o7777 == 0o600
    assert files.peek(path) == (envelope_of(chain[-1]), n, model.fingerprint, path.stat().st_size)
    assert [f.name for f in tmp_path.iterdir() if f.is_file()] == ["a"]
    drop(chain)

    grant = broker.grant(other, n)
    loaded = broker.run(other, p.LoadWork(str(path), grant))
    assert loaded.result.tokens == ids(n)
    assert loaded.usage == p.Usage(reused=n)
    assert envelope_of(grant.ref) == grant.envelope
    again = broker.run(worker, generate(ids(3, seed=1)), (grant.ref,))
    assert list(again.result.tokens) == expected(model, ids(n) + ids(3, seed=1))
    assert again.usage.reused == n
    drop((grant.ref,))


def test_a_file_holds_all_that_ancestors_held(paper_broker, model: Model, tmp_path: Path) -> None:
    """A context on a context whose image is gone; in the file it stands alone, and others may continue what was loaded."""
    broker = paper_broker()
    worker = broker.start()
    first = broker.create(worker, ids(130))
    chain = broker.create(worker, ids(90, seed=1), first)
    shm.unlink(first[-1].image)
    save(broker, worker, tmp_path / "b", chain)
    drop(chain)
    head = files.peek(tmp_path / "b")
    assert (head.envelope.parent, head.envelope.chain, head.envelope.first_block, head.envelope.n_blocks) == (None, (), 0, 3)
    grant = broker.grant(worker, 220)
    broker.run(worker, p.LoadWork(str(tmp_path / "b"), grant))
    after = broker.create(worker, ids(50, seed=2), (grant.ref,))
    done = broker.run(broker.start(), generate((9,)), after)
    assert list(done.result.tokens) == expected(model, (*ids(130), *ids(90, seed=1), *ids(50, seed=2), 9))
    drop(after)


def test_jobs_take_turns_with_files(paper_broker, model: Model, tmp_path: Path) -> None:
    """Saving and loading are cut into passes; a decoding job is none the worse for it."""
    broker = paper_broker()
    worker = broker.start(slots=2)
    chain = broker.create(worker, ids(900))
    talk = broker.assign(worker, generate(ids(5), 30), chain)
    work = p.SaveWork(str(tmp_path / "a"), envelope_of(chain[-1]))
    assert isinstance(broker.last_word(broker.assign(worker, work, chain)), p.Done)
    grant = broker.grant(worker, 900)
    assert isinstance(broker.last_word(broker.assign(worker, p.LoadWork(work.path, grant))), p.Done)
    assert list(broker.last_word(talk).result.tokens) == expected(model, ids(900) + ids(5), 30)
    drop((*chain, grant.ref))


# ---- what is refused


@pytest.fixture
def saved(paper_broker, tmp_path: Path):
    """A broker, a worker, and a sound file of 130 tokens."""
    broker = paper_broker()
    worker = broker.start(n_ctx=512)
    chain = broker.create(worker, ids(130))
    save(broker, worker, tmp_path / "a", chain)
    drop(chain)
    return broker, worker, tmp_path / "a"


def test_every_region_is_guarded(saved, pool_name: str) -> None:
    """A byte flipped in each page of the file that holds something."""
    broker, worker, path = saved
    whole = path.read_bytes()
    head = files.peek(path)
    refused = 0
    for page in range(0, len(whole), layout.PAGE):
        live = whole[page : page + layout.PAGE].rstrip(b"\0")
        if not live:
            continue
        at = page + len(live) // 2
        path.write_bytes(whole[:at] + bytes((whole[at] ^ 0x10,)) + whole[at + 1 :])
        error = broker.fail(worker, p.LoadWork(str(path), broker.grant(worker, 130)))
        assert error.code in ("image_damaged", "image_mismatch"), (at, error)
        refused += 1
    assert refused > 10
    assert shm.list_objects(pool_name) == []
    path.write_bytes(whole)
    grant = broker.grant(worker, 130)
    assert broker.run(worker, p.LoadWork(str(path), grant)).result.tokens == ids(130), "a refused file harmed the next one"
    assert head.file_bytes == len(whole)
    drop((grant.ref,))


def test_cut_foreign_and_missing_files_are_told_apart(saved, pool_name: str, tmp_path: Path) -> None:
    broker, worker, path = saved
    whole = path.read_bytes()
    wrong = {
        "cut": (whole[:-4096], "image_damaged", "does not fill it exactly"),
        "long": (whole + bytes(4096), "image_damaged", "does not fill it exactly"),
        "short": (whole[:100], "image_damaged", "no header"),
        "empty": (b"", "image_damaged", "no header"),
        "other": (b"GGUF" + bytes(5000), "image_damaged", "does not begin with an envelope"),
    }
    for name, (data, code, words) in wrong.items():
        (tmp_path / name).write_bytes(data)
        error = broker.fail(worker, p.LoadWork(str(tmp_path / name), broker.grant(worker, 130)))
        assert (error.code, words in error.message, name in error.message) == (code, True, True), error
    assert broker.fail(worker, p.LoadWork(str(tmp_path / "none"), broker.grant(worker, 130))).code == "unknown_context"
    assert broker.fail(worker, p.LoadWork(str(tmp_path), broker.grant(worker, 130))).code == "image_damaged"
    os.mkfifo(tmp_path / "pipe")
    assert broker.fail(worker, p.LoadWork(str(tmp_path / "pipe"), broker.grant(worker, 130))).code == "image_damaged"
    assert shm.list_objects(pool_name) == []


def test_a_thin_image_is_no_file(paper_broker, pool_name: str, tmp_path: Path) -> None:
    """An object copied out of shared memory lacks its blocks."""
    broker = paper_broker()
    worker = broker.start()
    chain = broker.create(worker, ids(130))
    (tmp_path / "a").write_bytes((shm.SHM / chain[0].image[1:]).read_bytes())
    drop(chain)
    assert broker.fail(worker, p.LoadWork(str(tmp_path / "a"), broker.grant(worker, 130))).code == "image_damaged"
    assert shm.list_objects(pool_name) == []


def test_files_of_other_models_and_sizes_are_refused(saved, paper_broker, pool_name: str) -> None:
    broker, worker, path = saved
    assert broker.fail(worker, p.LoadWork(str(path), broker.grant(worker, 131))).code == "internal", "granted for another length"
    short = broker.start(n_ctx=64)
    assert broker.fail(short, p.LoadWork(str(path), broker.grant(short, 130))).code == "too_long"
    wide = broker.start(kv_type="f32")
    assert broker.fail(wide, p.LoadWork(str(path), broker.grant(wide, 130))).code == "image_mismatch"
    assert shm.list_objects(pool_name) == []


def test_another_models_file_is_refused(paper_broker, tmp_path: Path, pool_name: str) -> None:
    """Another model, by its fingerprint, before its image is read; another version of the numbers likewise."""
    broker = paper_broker()
    worker = broker.start()
    chain = broker.create(worker, ids(70))
    save(broker, worker, tmp_path / "a", chain)
    whole = (tmp_path / "a").read_bytes()
    drop(chain)
    other = paper_broker("llama-tiny")  # takes over the address; the first one's worker stays connected
    stranger = other.start()
    error = other.fail(stranger, p.LoadWork(str(tmp_path / "a"), other.grant(stranger, 70)))
    assert (error.code, "another model" in error.message) == ("image_mismatch", True)
    with files.Writer(
        tmp_path / "a", envelope_for(70), pool="x", fingerprint=files.peek(tmp_path / "a").fingerprint, numerics=99
    ) as writer:
        for _ in writer.write(bytearray(whole[4096:])):
            pass
        writer.publish()
    error = broker.fail(worker, p.LoadWork(str(tmp_path / "a"), broker.grant(worker, 70)))
    assert (error.code, "numerics version 99" in error.message) == ("image_mismatch", True)
    assert shm.list_objects(pool_name) == []


# ---- what goes wrong while writing


def test_a_full_disk_leaves_the_old_file(saved, tmp_path: Path) -> None:
    """The real call refuses for real: the worker's file-size limit is below the file."""
    broker, worker, path = saved
    before = path.read_bytes()
    chain = broker.create(worker, ids(200))
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    for target in (path, tmp_path / "new"):
        error = broker.fail(worker, p.SaveWork(str(target), envelope_of(chain[-1])), chain)
        assert (error.code, str(tmp_path) in error.message) == ("store_full", False)
    assert [f.name for f in tmp_path.iterdir() if f.is_file()] == ["a"]
    assert path.read_bytes() == before
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save(broker, worker, path, chain)
    assert files.peek(path).n_tokens == 200
    drop(chain)


def test_a_directory_that_is_not_there_is_an_error(saved, tmp_path: Path) -> None:
    broker, worker, path = saved
    chain = broker.create(worker, ids(70))
    for target in (tmp_path / "none" / "a", path / "below a file"):
        assert broker.fail(worker, p.SaveWork(str(target), envelope_of(chain[-1])), chain).code == "engine"
    wrong = msgspec.structs.replace(envelope_of(chain[-1]), n_tokens=71)
    assert broker.fail(worker, p.SaveWork(str(tmp_path / "b"), wrong), chain).code == "internal"
    assert [f.name for f in tmp_path.iterdir() if f.is_file()] == ["a"]
    drop(chain)


@pytest.mark.parametrize("how", ["cancel", "fail", "pipe", "kill"])
def test_a_writer_that_ends_in_the_middle_leaves_the_old_file(saved, tmp_path: Path, how: str) -> None:
    """SIGKILL leaves a temporary file too, which the next writer removes."""
    broker, _, path = saved
    before = path.read_bytes()
    worker = broker.start(faults=("fail-save",) if how == "fail" else ("kill-save",) if how == "kill" else ("slow-save=2000",))
    chain = broker.create(worker, ids(200))
    job = broker.assign(worker, p.SaveWork(str(path), envelope_of(chain[-1])), chain)
    if how == "fail":
        assert broker.last_word(job).error.code == "internal"
    elif how == "kill":
        assert worker.process.wait(60) == -9
        assert len(list(tmp_path.glob(".a.*.tmp"))) == 1
        save(broker, broker.workers[0], tmp_path / "b", chain)
        (tmp_path / "b").unlink()
    else:
        while not list(tmp_path.glob(".a.*.tmp")):
            pass
        assert files.remove_stale(tmp_path) == 0, "its writer is alive"
        if how == "pipe":
            worker.cut_lifeline()
            assert worker.process.wait(60) == 0
        else:
            broker.send(worker, p.CancelJob(job, "cancelled"))
            broker.last_word(job)
    assert [f.name for f in tmp_path.iterdir() if f.is_file()] == ["a"]
    if how != "cancel":  # a cancel may come too late
        assert path.read_bytes() == before
    assert files.remove_stale(tmp_path) == 0
    drop(chain)

"""A real worker process, driven by a broker made of paper.

Property: whatever worker continues a context, it gives the tokens, log-probabilities and bytes that a fresh process gives which
prefills everything (FINDINGS rows 1, 5, 6, 7, 9); every job gets exactly one last word or the worker is dead; nothing is left in
shared memory that was not sealed. Tolerance: none, all are equalities. Reason: the broker retries and caches on the strength of
this.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from worker_kit import drop, expected, generate, ids, mapped_names, published

from geist_pool import config
from geist_pool import protocol as p
from geist_pool.engine import Model, Session
from geist_pool.store import shm


def test_a_worker_imports_no_tokenizer() -> None:
    script = (
        "import sys, geist_pool.worker.main\n"
        "print([m for m in ('tokenizers', 'rich', 'prometheus_client', 'jinja2', 'huggingface_hub', 'click')"
        " if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_signal_while_the_model_is_loaded_ends_it_without_a_word(tiny_model, packed_dir: Path) -> None:
    worker = config.WorkerConfig(
        store="none",
        worker="w0",
        worker_address="ipc:///nobody",
        model_path=str(tiny_model("qwen35-tiny")),
        cache_dir=str(packed_dir),
    )
    script = (
        "import os, signal, sys\n"
        "from geist_pool.engine import Gguf\n"
        "from geist_pool.worker.main import main\n"
        "opened = Gguf.__init__\n"
        "Gguf.__init__ = lambda *a: [opened(*a), os.kill(os.getpid(), signal.SIGTERM), signal.pause()]\n"
        "sys.exit(main(['worker', sys.argv[1]]))\n"
    )
    call = [sys.executable, "-c", script, config.to_json(worker)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_hello_says_what_it_is(paper_broker, model: Model) -> None:
    hello = paper_broker().start(slots=2, threads=2, n_ctx=300, kv_type="f32", tier="scalar").hello
    assert hello.fingerprint == model.fingerprint
    assert hello.geometry == model.geometry("f32")
    assert (hello.n_ctx, hello.n_vocab, hello.kv_type, hello.tier) == (300, 512, "f32", "scalar")
    assert (hello.slots, hello.threads, hello.architecture) == (2, 2, "qwen35")


# ---- one answer


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("m", [0, 1, 70])
def test_another_worker_continues_a_context(paper_broker, model: Model, n: int, m: int) -> None:
    """Exact to the token, a suffix of 0 included (FINDINGS row 7); what was reused and prefilled is told (row 5)."""
    broker = paper_broker()
    maker, user = broker.start(prefill_chunk=32), broker.start(prefill_chunk=7, tier="scalar")
    prompt, suffix = ids(n), ids(m, seed=1)
    chain = broker.create(maker, prompt)
    done = broker.run(user, generate(suffix), chain)
    assert done.usage == p.Usage(reused=n, prefilled=m, generated=8)
    assert list(done.result.tokens) == expected(model, prompt + suffix)
    assert done.result.finish_reason == "length"
    whole = broker.run(maker, generate(prompt + suffix))
    assert whole.usage == p.Usage(reused=0, prefilled=n + m, generated=8)
    assert whole.result == done.result, "hit and miss differ"
    drop(chain)


def test_three_generations_and_a_lost_image(paper_broker, model: Model) -> None:
    """A context on a context on a context; of ancestors only the blocks are needed."""
    broker = paper_broker()
    maker = broker.start()
    first = broker.create(maker, ids(130))
    second = broker.create(maker, ids(20, seed=1), first)  # 150 tokens, no whole block of its own
    third = broker.create(maker, ids(50, seed=2), second)  # 200 tokens, one block
    assert second[-1].kv is None
    for ref in third[:-1]:
        shm.unlink(ref.image)
    user = broker.start()
    done = broker.run(user, generate(ids(3, seed=3)), third)
    assert list(done.result.tokens) == expected(model, ids(130) + ids(20, seed=1) + ids(50, seed=2) + ids(3, seed=3))
    assert done.usage.reused == 200
    drop(third)


@pytest.mark.parametrize("slots", [1, 3])
def test_what_a_worker_did_before_leaves_no_trace(paper_broker, slots: int) -> None:
    """Unrelated prompts first, some of them failed or cancelled; then everything equals a fresh worker's (FINDINGS row 1)."""
    broker = paper_broker()
    used, fresh = broker.start(slots=slots), broker.start(slots=slots)
    for seed in range(4):
        broker.run(used, generate(ids(50 + 40 * seed, seed=10 + seed), 5))
    stranger = broker.create(used, ids(90, seed=20))
    broker.run(used, generate(ids(9, seed=21), 20, sampling=p.Sampling(temperature=2, seed=5, repeat_penalty=1.5)), stranger)
    assert broker.fail(used, generate((3, 600))).code == "bad_request"
    assert broker.fail(used, generate(ids(1025))).code == "too_long"
    job = broker.assign(used, generate(ids(300, seed=22), 600))
    broker.send(used, p.CancelJob(job, "cancelled"))
    assert isinstance(broker.last_word(job), p.Failed)

    made = {w.hello.worker: broker.create(w, ids(130)) for w in (used, fresh)}
    assert published(made["w1"][-1]) == published(made["w2"][-1])
    answers = [broker.run(w, generate(ids(10, seed=1), 30), made["w1"]) for w in (used, fresh)]
    assert answers[0].result == answers[1].result
    assert answers[0].usage == answers[1].usage
    for chain in (stranger, *made.values()):
        drop(chain)


def test_seeded_sampling_is_repeated_anywhere(paper_broker, model: Model) -> None:
    broker = paper_broker()
    one, other = broker.start(), broker.start(tier="scalar", prefill_chunk=1)
    chain = broker.create(one, ids(70))
    sampling = p.Sampling(temperature=1.5, top_k=50, top_p=0.95, seed=12345, stream=3)
    answers = {broker.run(w, generate((9,), 20, sampling=sampling), chain).result.tokens for w in (one, other)}
    assert answers == {tuple(expected(model, (*ids(70), 9), 20, sampling))}
    drop(chain)


def test_scores_are_the_engines_in_any_order(paper_broker, model: Model) -> None:
    """Labels one by one, together and permuted (FINDINGS row 10)."""
    broker = paper_broker()
    worker = broker.start()
    chain = broker.create(worker, ids(70))
    labels = [ids(n, seed=n) for n in (1, 2, 5, 9)]
    done = broker.run(worker, p.ScoreWork(ids(4, seed=7), tuple(labels)), chain)
    with Session(model) as session:
        session.prefill(ids(70) + ids(4, seed=7))
        assert [list(s) for s in done.result.logprobs] == [session.score(label).tolist() for label in labels]
    assert done.usage == p.Usage(reused=70, prefilled=4, generated=17)
    backwards = broker.run(worker, p.ScoreWork(ids(4, seed=7), tuple(reversed(labels))), chain)
    assert tuple(reversed(backwards.result.logprobs)) == done.result.logprobs
    for label, scores in zip(labels, done.result.logprobs, strict=True):
        assert broker.run(worker, p.ScoreWork(ids(4, seed=7), (label,)), chain).result.logprobs == (scores,)
    drop(chain)


# ---- answers


def test_a_stream_adds_up_to_the_answer(paper_broker, model: Model) -> None:
    broker = paper_broker()
    worker = broker.start()
    job = broker.assign(worker, generate(ids(20), 25, stream=True))
    done = broker.last_word(job)
    parts = [m for _, m in broker.heard if isinstance(m, p.Tokens)]
    assert [t for part in parts for t in part.tokens] == list(done.result.tokens)
    assert [part.index for part in parts] == list(range(25))
    assert b"".join(part.data for part in parts) == done.result.data
    assert [part.byte_index for part in parts] == [sum(len(x.data) for x in parts[:i]) for i in range(25)]
    assert tuple(lp for part in parts for lp in part.logprobs) == done.result.logprobs
    assert done.result.data == b"".join(model.token_bytes(t) for t in done.result.tokens)


def test_logprobs_are_the_models_own(paper_broker, model: Model) -> None:
    """Before temperature and penalties; the chosen token's value is that of a score (FINDINGS row 12)."""
    broker = paper_broker()
    worker = broker.start()
    hot = p.Sampling(temperature=5, repeat_penalty=2, seed=3)
    result = broker.run(worker, generate(ids(20), 10, sampling=hot, logprobs=3)).result
    with Session(model) as session:
        session.prefill(ids(20))
        assert [lp.logprob for lp in result.logprobs] == session.score(result.tokens).tolist()
        top_ids, top = session.top(3)
        assert result.logprobs[0].top == tuple(zip(top_ids.tolist(), top.tolist(), strict=True))
    assert broker.run(worker, generate(ids(20), 10, logprobs=0)).result.logprobs[0].top == ()
    assert broker.run(worker, generate(ids(20), 10, logprobs=None)).result.logprobs is None


def test_a_stop_string_ends_the_answer_before_it(paper_broker, model: Model) -> None:
    broker = paper_broker()
    worker = broker.start()
    free = broker.run(worker, generate(ids(20), 30)).result
    stop = free.data[6:10]
    at = free.data.find(stop)
    job = broker.assign(worker, generate(ids(20), 30, stop=(b"\xff never", stop), stream=True))
    done = broker.last_word(job)
    assert (done.result.finish_reason, done.result.stop_index) == ("stop", 1)
    assert done.result.data == free.data[:at]
    assert done.result.tokens == free.tokens[: len(done.result.tokens)]
    parts = [m for _, m in broker.heard if isinstance(m, p.Tokens)]
    assert b"".join(part.data for part in parts) == free.data[:at], "a byte of a stop string was let through"

    # A stop string that begins and does not come: its bytes belong to the answer.
    begun = broker.run(worker, generate(ids(20), 30, stop=(free.data[-1:] + b"\xff\xff",))).result
    assert (begun.data, begun.finish_reason) == (free.data, "length")


def test_an_end_token_ends_the_answer_and_is_no_part_of_it(paper_broker, model: Model) -> None:
    broker = paper_broker()
    worker = broker.start()
    free = broker.run(worker, generate(ids(20), 30)).result
    eog = free.tokens[5]
    n = free.tokens.index(eog)
    done = broker.run(worker, generate(ids(20), 30, eog=(eog,)))
    assert done.result.tokens == free.tokens[:n]
    assert (done.result.finish_reason, done.result.stop_index) == ("stop", None)
    assert done.usage.generated == n
    assert len(done.result.logprobs) == n


def test_the_session_being_full_ends_the_answer(paper_broker) -> None:
    broker = paper_broker()
    worker = broker.start(n_ctx=64)
    done = broker.run(worker, generate(ids(60), 30))
    assert (len(done.result.tokens), done.result.finish_reason) == (5, "length")


# ---- between passes


def test_jobs_take_turns(paper_broker, model: Model) -> None:
    """A decoding job goes on while a long prompt is taken in (FINDINGS row 19), and both answers are those of a run alone."""
    broker = paper_broker()
    worker = broker.start(slots=2, prefill_chunk=8)
    short = broker.assign(worker, generate(ids(5), 30, stream=True))
    long = broker.assign(worker, generate(ids(400, seed=1), 4))
    assert list(broker.last_word(long).result.tokens) == expected(model, ids(400, seed=1), 4)
    assert list(broker.last_word(short).result.tokens) == expected(model, ids(5), 30)
    ends = [m.job for _, m in broker.heard if isinstance(m, p.Done)]
    assert ends == [short, long], "30 tokens waited for a prompt of 50 chunks"


def test_a_cancel_frees_that_job_only(paper_broker, model: Model) -> None:
    """FINDINGS row 18."""
    broker = paper_broker()
    worker = broker.start(slots=2, faults=("slow-decode=10",))
    first = broker.assign(worker, generate(ids(5), 900))
    second = broker.assign(worker, generate(ids(6), 20))
    broker.send(worker, p.CancelJob(first, "cancelled"))
    broker.send(worker, p.CancelJob("no such job", "cancelled"))
    word = broker.last_word(first)
    assert isinstance(word, p.Failed)
    assert word.error.code == "cancelled"
    third = broker.assign(worker, generate(ids(7), 3))
    assert list(broker.last_word(third).result.tokens) == expected(model, ids(7), 3)
    assert list(broker.last_word(second).result.tokens) == expected(model, ids(6), 20)


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_a_cancel_may_keep_what_there_is(paper_broker, model: Model, reason: str) -> None:
    broker = paper_broker()
    worker = broker.start(faults=("slow-decode=10",))
    job = broker.assign(worker, generate(ids(5), 900, stream=True))
    while len(broker.heard) < 5:
        broker.receive()
    broker.send(worker, p.CancelJob(job, reason, finish=True))
    done = broker.last_word(job)
    assert isinstance(done, p.Done)
    assert done.result.finish_reason == reason
    assert 4 <= len(done.result.tokens) < 900
    assert list(done.result.tokens) == expected(model, ids(5), len(done.result.tokens))
    scoring = broker.assign(worker, p.ScoreWork(ids(900), (ids(3),)))
    broker.send(worker, p.CancelJob(scoring, reason, finish=True))
    assert broker.last_word(scoring).error.code == reason


def test_a_ping_is_answered_between_passes(paper_broker) -> None:
    broker = paper_broker()
    worker = broker.start(prefill_chunk=8, faults=("slow-prefill=5",))
    job = broker.assign(worker, generate(ids(800), 1))
    assert broker.answer(worker, p.Ping(7)).n == 7
    assert not any(isinstance(m, p.Done) for _, m in broker.heard), "the ping waited for the job"
    assert isinstance(broker.last_word(job), p.Done)


def test_a_job_too_many_is_refused_with_a_word(paper_broker) -> None:
    broker = paper_broker()
    worker = broker.start(faults=("slow-decode=10",))
    first = broker.assign(worker, generate(ids(5), 10))
    assert broker.fail(worker, generate(ids(5), 10)).code == "internal"
    assert isinstance(broker.last_word(first), p.Done)


# ---- mappings


def test_announced_contexts_are_mapped_and_forgotten(paper_broker) -> None:
    broker = paper_broker()
    worker = broker.start()
    chain = broker.create(worker, ids(130))
    context = chain[-1].id
    assert mapped_names(worker.process.pid) == []
    assert broker.answer(worker, p.Announce(chain)) == p.Mapped(context)
    assert len(mapped_names(worker.process.pid)) == 2
    drop(chain)
    assert broker.run(worker, generate((3,), 2), chain).usage.reused == 130, "mapped is mapped, with or without a name"
    assert broker.answer(worker, p.Forget(context)) == p.Forgotten(context)
    assert mapped_names(worker.process.pid) == []
    assert broker.answer(worker, p.Forget(context)) == p.Forgotten(context)
    assert broker.fail(worker, generate((3,), 2), chain).code == "image_damaged"


def test_a_context_in_use_is_forgotten_afterwards(paper_broker) -> None:
    broker = paper_broker()
    worker = broker.start(slots=2, faults=("slow-decode=5",))
    chain = broker.create(worker, ids(130))
    job = broker.assign(worker, generate((3,), 30, stream=True), chain)
    assert isinstance(broker.receive()[1], p.Tokens)
    broker.send(worker, p.Forget(chain[-1].id))
    assert isinstance(broker.last_word(job), p.Done)
    assert broker.receive()[1] == p.Forgotten(chain[-1].id)
    assert mapped_names(worker.process.pid) == []
    drop(chain)


@pytest.mark.parametrize("where", ["envelope", "image", "kv"])
def test_a_damaged_context_is_told_and_not_used(paper_broker, where: str) -> None:
    broker = paper_broker()
    worker = broker.start()
    chain = broker.create(worker, ids(130))
    name = chain[-1].kv if where == "kv" else chain[-1].image
    with (shm.SHM / name[1:]).open("r+b") as f:
        f.seek({"envelope": 140, "image": chain[-1].image_bytes - 4096, "kv": 70_000}[where])
        f.write(b"\x5a\xa5\x5a\xa5")
    mapped = broker.answer(worker, p.Announce(chain))
    assert mapped.error is not None
    assert mapped.error.code == "image_damaged"
    assert broker.fail(worker, generate((3,)), chain).code == "image_damaged"
    assert mapped_names(worker.process.pid) == []
    assert isinstance(broker.run(worker, generate((3,))), p.Done)
    drop(chain)


# ---- failures


def test_a_full_store_leaves_nothing_and_the_worker_works_on(paper_broker, pool_name: str) -> None:
    """The real call refuses for real: the worker's file-size limit is below the image (FINDINGS row 16)."""
    broker = paper_broker()
    worker = broker.start()
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    error = broker.fail(worker, p.CreateWork(ids(130), broker.grant(worker, 130)))
    assert error.code == "store_full"
    assert shm.list_objects(pool_name) == []
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    drop(broker.create(worker, ids(130)))


def test_a_grant_that_does_not_fit_is_refused(paper_broker, pool_name: str) -> None:
    broker = paper_broker()
    worker = broker.start()
    assert broker.fail(worker, p.CreateWork(ids(129), broker.grant(worker, 130))).code == "internal"
    chain = broker.create(worker, ids(130))
    again = p.Grant(chain[-1], msgspec.structs.replace(broker.grant(worker, 130).envelope, id=chain[-1].id))
    assert broker.fail(worker, p.CreateWork(ids(130), again)).code == "internal"
    assert len(shm.list_objects(pool_name)) == 2, "an object of another's making was removed"
    drop(chain)


def test_a_logit_that_is_not_finite_fails_that_job_only(paper_broker, nan_model: Path) -> None:
    broker = paper_broker(nan_model)
    worker = broker.start()
    before = broker.run(worker, generate((3, 4)))
    assert broker.fail(worker, generate((3, 7, 4))).code == "nonfinite"
    assert broker.run(worker, generate((3, 4))).result == before.result


def test_nothing_to_go_on_is_an_error(paper_broker) -> None:
    broker = paper_broker()
    worker = broker.start()
    assert broker.fail(worker, generate(())).code == "engine"
    assert broker.fail(worker, p.ScoreWork((3,), ((),))).code == "engine"


# ---- death


@pytest.mark.parametrize("point", ["attach", "prefill", "publish", "seal", "decode", "score", "reply"])
def test_a_killed_worker_is_replaced_without_a_trace(paper_broker, pool_name: str, model: Model, point: str) -> None:
    """SIGKILL at the worst moments: the next worker gives the answer of the first, and what is left has granted names and is no
    sound context (FINDINGS rows 14 and 15)."""
    broker = paper_broker()
    maker = broker.start()
    chain = broker.create(maker, ids(70))
    kept = {f.name for f in shm.list_objects(pool_name)}
    victim = broker.start(faults=(f"kill-{point}",))
    grant = broker.grant(maker, 200, chain)
    work: p.Work = generate(ids(9, seed=1))
    if point in ("publish", "seal"):
        work = p.CreateWork(ids(130, seed=1), grant)
    elif point == "score":
        work = p.ScoreWork(ids(9, seed=1), (ids(3, seed=2),))
    broker.assign(victim, work, chain)
    assert victim.process.wait(60) == -9
    assert broker.silent(50)
    left = {f.name for f in shm.list_objects(pool_name)} - kept
    assert left == ({grant.ref.image, grant.ref.kv} if point == "seal" else set())
    for name in left:
        shm.unlink(name)
    if isinstance(work, p.CreateWork):
        again = broker.grant(maker, 200, chain, attempt=2)
        broker.run(maker, p.CreateWork(work.tokens, again), chain)
        drop((again.ref,))
    else:
        assert broker.run(maker, work, chain).result == broker.run(broker.start(), work, chain).result
    drop(chain)


@pytest.mark.parametrize("point", ["publish", "seal"])
def test_a_worker_that_goes_with_its_parent_takes_unsealed_objects_along(paper_broker, pool_name: str, point: str) -> None:
    """While it publishes; what is sealed stays for the next pool (FINDINGS row 15)."""
    broker = paper_broker()
    worker = broker.start(faults=(f"slow-{point}=3000",))
    job = broker.assign(worker, p.CreateWork(ids(130), broker.grant(worker, 130)))
    while point == "seal" and len(shm.list_objects(pool_name)) < 2:
        pass
    worker.cut_lifeline()
    assert worker.process.wait(60) == 0
    assert not any(getattr(m, "job", None) == job for _, m in broker.heard)
    assert shm.list_objects(pool_name) == []


def test_a_worker_that_fails_at_its_last_word_ends(paper_broker, model: Model) -> None:
    broker = paper_broker()
    worker = broker.start(faults=("fail-reply=2",))
    assert isinstance(broker.run(worker, generate(ids(5))), p.Done)
    broker.assign(worker, generate(ids(5)))
    assert worker.process.wait(60) == 1
    assert broker.silent(50)


@pytest.mark.parametrize("point", ["attach", "prefill", "decode", "score", "publish", "seal"])
def test_a_job_that_fails_at_a_point_leaves_no_trace(paper_broker, pool_name: str, model: Model, point: str) -> None:
    """Its session and contexts are as new for the next one."""
    broker = paper_broker()
    worker = broker.start(faults=(f"fail-{point}=2",) if point in ("prefill", "decode", "score") else (f"fail-{point}",))
    maker = broker.start()
    chain = broker.create(maker, ids(70))
    work: p.Work = generate(ids(200, seed=1), 4)
    if point == "score":
        work = p.ScoreWork((3,), (ids(2), ids(3)))
    if point in ("publish", "seal"):
        work = p.CreateWork(ids(60), broker.grant(maker, 130, chain))
    assert broker.fail(worker, work, chain).code == "internal"
    assert broker.answer(worker, p.Forget(chain[-1].id)) == p.Forgotten(chain[-1].id)
    assert mapped_names(worker.process.pid) == []
    assert len(shm.list_objects(pool_name)) == 2
    done = broker.run(worker, generate(ids(9, seed=1)), chain)
    assert list(done.result.tokens) == expected(model, ids(70) + ids(9, seed=1))
    drop(chain)


@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_goes_with_its_parent(paper_broker, busy: bool) -> None:
    broker = paper_broker()
    worker = broker.start(faults=("slow-decode=10",))
    if busy:
        broker.assign(worker, generate(ids(5), 900, stream=True))
        broker.receive()
    worker.cut_lifeline()
    assert worker.process.wait(60) == 0


def test_shutdown_ends_every_job_with_a_word(paper_broker, pool_name: str) -> None:
    broker = paper_broker()
    worker = broker.start(slots=2, faults=("slow-decode=10",))
    chain = broker.create(worker, ids(130))
    jobs = [broker.assign(worker, generate(ids(5), 900), chain) for _ in range(2)]
    assert broker.stop(worker) == 0
    assert [broker.last_word(job).error.code for job in jobs] == ["stopping"] * 2
    assert len(shm.list_objects(pool_name)) == 2, "sealed contexts are the broker's"
    drop(chain)


@pytest.mark.parametrize("changes", [{"model_path": "/no/such.gguf"}, {"n_ctx": 1 << 20}, {"tier": "scalar", "kv_type": "q4"}])
def test_a_worker_that_cannot_start_says_why(
    tiny_model: Callable[..., Path], packed_dir: Path, changes: dict[str, object]
) -> None:
    settings = {
        "pool": "x",
        "worker": "w",
        "worker_address": "ipc:///tmp/nowhere",
        "model_path": str(tiny_model("llama-tiny")),
        "cache_dir": str(packed_dir),
    }
    text = msgspec.json.encode(settings | changes).decode()
    done = subprocess.run([sys.executable, "-m", "geist_pool.worker.main", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


def test_a_context_that_was_dropped_meanwhile_is_no_warning(paper_broker, capfd):  # type: ignore[no-untyped-def]
    broker = paper_broker()
    worker = broker.start()
    chain = broker.create(worker, ids(80))
    drop(chain)
    broker.send(worker, p.Forget(chain[-1].id))
    assert isinstance(broker.receive()[1], p.Forgotten)
    told = broker.answer(worker, p.Announce(chain))
    assert isinstance(told, p.Mapped) and told.error is not None
    broker.stop(worker)
    assert "cannot be used" not in capfd.readouterr().err

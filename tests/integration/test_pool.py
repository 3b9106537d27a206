"""The whole pool on a tiny hybrid model: client, broker, two workers, shared memory.

Property: whatever way an answer takes (snapshot or whole prompt, which worker, how many at a time, a worker or the broker killed
on the way), its tokens and log-probabilities are those of one session that prefills the whole prompt alone, bit for bit; and
nothing is left afterwards. Tolerance: none. Reason: these are the pool's promises, and a wrong state is often not seen in text.
Waits have generous limits; no duration is asserted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from pool_kit import Reference, ids, private_run_dir, running, until

from geist_pool import errors
from geist_pool.client import Client
from geist_pool.config import PoolConfig, store_key
from geist_pool.protocol import GenerateResult, Message, Sampling
from geist_pool.store import shm
from geist_pool.supervisor import Supervisor

STORY = (
    "The ferry does not cross at night. Hesper keeps the inn on the wrong bank, Odo keeps the ferry, and the river keeps what "
    "falls in. Nip takes bets on all three of them, and has never lost one that she could count."
)
SUFFIX = "\nNip says:"
OTHER = "A quite different prompt about nothing in particular."
NAME = f"it-{os.getpid()}"


@pytest.fixture(scope="module")
def reference(tiny_model: Callable[..., Path], packed_dir: Path) -> Iterator[Reference]:
    made = Reference(tiny_model("qwen35-tiny"), packed_dir)
    yield made
    made.close()


@pytest.fixture(scope="module")
def make_config(tiny_model: Callable[..., Path], packed_dir: Path) -> Iterator[Callable[..., PoolConfig]]:
    """Configurations whose sockets lie in a directory of this module, with a short path as sockets need it."""
    with private_run_dir():
        fields = {"model": str(tiny_model("qwen35-tiny")), "workers": 2, "cache_dir": str(packed_dir), "memory": 64 << 20}
        yield lambda **changes: PoolConfig(**{**fields, "log_level": "error", "pin_cores": False, **changes})


@pytest.fixture(scope="module")
def pool(make_config: Callable[..., PoolConfig]) -> Iterator[Supervisor]:
    """One pool for all tests that do no harm to it."""
    with running(make_config(name=NAME)) as made, Client(made.config.address) as client:
        client.generate([Message("user", "warm up")], max_tokens=1)  # the template process starts with the first messages
        yield made


@pytest.fixture
def client(pool: Supervisor) -> Iterator[Client]:
    with Client(pool.config.address, timeout=60) as made:
        yield made
        for context in made.contexts():
            made.drop_context(context.id)


# ---- answers


def test_info_and_tokenize(client: Client, pool: Supervisor) -> None:
    info = client.info()
    assert (info.pool, info.architecture, info.workers, info.n_vocab) == (NAME, "qwen35", 2, 512)
    assert pool.facts is not None and info.fingerprint == pool.facts.fingerprint
    assert 20 < len(ids(client, STORY)) <= len(STORY.encode())


def test_context_serves_by_name_id_and_content(client: Client, reference: Reference) -> None:
    """FINDINGS rows 5 and 8: exactly the suffix is prefilled, and the whole hybrid state comes back."""
    made = client.create_context(STORY, name="inn")
    story, suffix = ids(client, STORY), ids(client, SUFFIX)
    assert made.created and made.context.n_tokens == len(story) and made.usage.prefilled == len(story)
    expected = reference.generate(story + suffix, 12)
    answers = [
        client.generate(SUFFIX, context="inn", max_tokens=12, ignore_eog=True),
        client.generate(SUFFIX, context=made.context.id, max_tokens=12, ignore_eog=True),
        client.generate(story + suffix, max_tokens=12, ignore_eog=True),
    ]
    for answer in answers:
        assert answer.tokens == expected
        assert answer.context == made.context.id
        assert (answer.usage.reused, answer.usage.prefilled, answer.usage.generated) == (len(story), len(suffix), 12)
        assert answer.finish_reason == "length"
    again = client.create_context(STORY)
    assert (again.created, again.context.id) == (False, made.context.id)


def test_empty_suffix_and_context_on_context(client: Client, reference: Reference) -> None:
    """FINDINGS row 7: a suffix of 0 works through the saved pending logits."""
    story, more = ids(client, STORY), ids(client, OTHER)
    client.create_context(STORY, name="base")
    child = client.create_context(OTHER, on="base", name="child")
    assert (child.usage.reused, child.usage.prefilled) == (len(story), len(more))
    answer = client.generate(context="child", max_tokens=5, ignore_eog=True)
    assert answer.tokens == reference.generate(story + more, 5)
    assert (answer.usage.reused, answer.usage.prefilled) == (len(story) + len(more), 0)
    client.drop_context("base")
    assert client.generate(context="child", max_tokens=5, ignore_eog=True).tokens == answer.tokens


def test_no_match_is_no_hit(client: Client, reference: Reference) -> None:
    """FINDINGS row 2: the reply says that nothing was used, and where the nearest context differs."""
    made = client.create_context(STORY, name="inn")
    prompt = (*ids(client, STORY)[:20], *ids(client, OTHER))
    answer = client.generate(prompt, max_tokens=6, ignore_eog=True)
    assert answer.tokens == reference.generate(prompt, 6)
    assert (answer.context, answer.usage.reused, answer.usage.prefilled) == (None, 0, len(prompt))
    assert answer.mismatch is not None and answer.mismatch.context == made.context.id
    common = next(i for i, (a, b) in enumerate(zip(prompt, ids(client, STORY), strict=False)) if a != b)
    assert answer.mismatch.position == common


def test_spaces_do_not_see_each_other(client: Client, pool: Supervisor) -> None:
    client.create_context(STORY, name="inn")
    with Client(pool.config.address, space="elsewhere") as stranger:
        assert stranger.contexts() == ()
        with pytest.raises(errors.UnknownContext):
            stranger.generate(SUFFIX, context="inn")
        answer = stranger.generate(STORY, max_tokens=1)
        assert (answer.context, answer.usage.reused, answer.mismatch) == (None, 0, None)


def test_scores_are_those_of_teacher_forcing(client: Client, reference: Reference) -> None:
    """FINDINGS rows 10 to 13: exactly the label's tokens, alone and in company, each value <= 0, sum and mean named as such."""
    client.create_context(STORY, name="inn")
    labels = [" a very merry mood", " wet", " the goose did it", " x"]
    prompt = ids(client, STORY, SUFFIX)
    expected = [reference.score(prompt, ids(client, label)) for label in labels]
    together = client.score(SUFFIX, labels, context="inn")
    assert [s.logprobs for s in together.labels] == expected
    assert [s.tokens for s in together.labels] == [ids(client, label) for label in labels]
    backwards = client.score(SUFFIX, labels[::-1], context="inn")
    assert [s.logprobs for s in backwards.labels] == expected[::-1]
    for i, label in enumerate(labels):
        assert client.score(prompt, [ids(client, label)]).labels[0].logprobs == expected[i]
    for score in together.labels:
        assert all(value <= 0 for value in score.logprobs)
        assert score.sum == pytest.approx(sum(score.logprobs), rel=1e-12)
        assert score.mean == pytest.approx(score.sum / len(score.tokens), rel=1e-12)
    assert together.best == max(range(4), key=lambda i: together.labels[i].sum)
    assert together.best_mean == max(range(4), key=lambda i: together.labels[i].mean)


def test_generated_logprobs_are_the_scores(client: Client) -> None:
    """FINDINGS row 12."""
    client.create_context(STORY, name="inn")
    answer = client.generate(SUFFIX, context="inn", max_tokens=6, ignore_eog=True, logprobs=3)
    assert answer.logprobs is not None
    score = client.score(SUFFIX, [answer.tokens], context="inn").labels[0]
    assert tuple(entry.logprob for entry in answer.logprobs) == score.logprobs
    assert all(len(entry.top) == 3 and entry.top[0] == (entry.token, entry.logprob) for entry in answer.logprobs)


def test_stream_is_the_answer_in_pieces(client: Client) -> None:
    client.create_context(STORY, name="inn")
    whole = client.generate(SUFFIX, context="inn", max_tokens=20, ignore_eog=True)
    with client.stream(SUFFIX, context="inn", max_tokens=20, ignore_eog=True) as stream:
        chunks = list(stream)
        result = stream.result()
    assert (result.tokens, result.text, result.raw) == (whole.tokens, whole.text, whole.raw)
    assert tuple(t for c in chunks for t in c.tokens) == whole.tokens
    assert "".join(c.text for c in chunks) == whole.text
    at = 0
    for chunk in chunks:
        assert chunk.index == at
        at += len(chunk.tokens)


def test_cancel_ends_that_request_alone(
    make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str], reference: Reference
) -> None:
    """FINDINGS row 18. Decoding is slowed down so that the cancelled request cannot have ended by itself."""
    config = make_config(name=new_pool_name(), faults=("slow-decode=5",))
    with running(config) as pool, Client(pool.config.address) as client:
        prompt = ids(client, STORY)
        with client.stream(prompt, max_tokens=800, ignore_eog=True) as doomed:
            next(doomed)
            with client.stream(prompt, max_tokens=30, ignore_eog=True) as other:
                next(other)
                doomed.cancel()
                cancelled = doomed.result()
                assert other.result().tokens == reference.generate(prompt, 30)
        assert cancelled.finish_reason == "cancelled"
        assert 1 <= len(cancelled.tokens) < 800
        assert cancelled.tokens == reference.generate(prompt, len(cancelled.tokens))
        until(lambda: client.stats().workers_busy == 0)


# ---- many at a time


def requests(client: Client) -> list[Callable[[Client], object]]:
    """Different questions of every kind; each gives what must not depend on anything else."""

    def generated(prompt: str, context: str | None, seed: int | None) -> Callable[[Client], object]:
        sampling = Sampling() if seed is None else Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=seed)

        def ask(client: Client) -> object:
            answer = client.generate(prompt, context=context, max_tokens=10, ignore_eog=True, sampling=sampling)
            return answer.tokens, answer.raw, answer.usage

        return ask

    def scored(prompt: str) -> Callable[[Client], object]:
        return lambda client: [s.logprobs for s in client.score(prompt, [" yes", " no, not at all", " 7"], context="inn").labels]

    out: list[Callable[[Client], object]] = []
    for i in range(6):
        out += [generated(f"\nQuestion {i}:", "inn", None), generated(f"\nQuestion {i}:", "inn", i), scored(f"\nIs it {i}?")]
        out += [generated(f"{OTHER} {i}", None, i)]
    return out


def test_parallel_equals_serial_for_any_shape_of_pool(
    client: Client, make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str]
) -> None:
    """FINDINGS rows 3 and 9: 16 clients at a time, other counts of workers, slots and threads, another tier: the same answers."""
    client.create_context(STORY, name="inn")
    asked = requests(client)
    serial = [ask(client) for ask in asked]
    shapes = [
        {"workers": 2},
        {"workers": 1, "slots": 4, "threads": 2, "prefill_chunk": 7},
        {"workers": 2, "slots": 2, "tier": "scalar"},
    ]
    for shape in shapes:
        with running(make_config(name=new_pool_name(), **shape)) as other:
            with Client(other.config.address) as first:
                first.create_context(STORY, name="inn")

            def one(ask: Callable[[Client], object], address: str = other.config.address) -> object:
                with Client(address) as own:
                    return ask(own)

            with ThreadPoolExecutor(16) as threads:
                assert list(threads.map(one, asked)) == serial, shape


# ---- deaths


def two_streams(client: Client, prompt: tuple[int, ...], n: int) -> list[GenerateResult]:
    """Two answers at a time, read chunk by chunk; their chunks must fit together without a gap or a repeat."""
    streams = [client.stream(prompt, max_tokens=n, ignore_eog=True) for _ in range(2)]
    out: list[GenerateResult] = []
    for stream in streams:
        tokens: list[int] = []
        for chunk in stream:
            assert chunk.index == len(tokens)
            tokens += chunk.tokens
        out.append(stream.result())
        assert tuple(tokens) == out[-1].tokens
    return out


def test_killed_worker_costs_no_answer(
    make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str], reference: Reference
) -> None:
    """FINDINGS row 14: another worker finishes with the same tokens, once each; the dead one comes back."""
    config = make_config(name=new_pool_name(), faults=("w0.0:kill-decode=9",))
    with running(config) as pool, Client(pool.config.address) as client:
        client.create_context(STORY, name="inn")
        prompt = ids(client, STORY, SUFFIX)
        expected = reference.generate(prompt, 24)
        first = pool.pids["w0"]
        answers = two_streams(client, prompt, 24)
        assert [a.tokens for a in answers] == [expected, expected]
        assert sorted(a.attempts for a in answers) == [1, 2]
        until(lambda: client.stats().workers == 2 and pool.pids.get("w0", first) != first)
        stats = client.stats()
        assert (stats.workers_lost, stats.jobs_retried, stats.errors) == (1, 1, {})
        again = two_streams(client, prompt, 24)
        assert [a.tokens for a in again] == [expected, expected]
        assert {a.usage.reused for a in again} == {len(ids(client, STORY))}


def test_worker_killed_from_outside(
    make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str], reference: Reference
) -> None:
    """FINDINGS row 14, with a real SIGKILL at an arbitrary moment."""
    config = make_config(name=new_pool_name(), faults=("slow-decode=20",))
    with running(config) as pool, Client(pool.config.address) as client:
        prompt = ids(client, STORY)
        streams = [client.stream(prompt, max_tokens=60, ignore_eog=True) for _ in range(2)]
        for stream in streams:
            next(stream)
        os.kill(pool.pids["w1"], signal.SIGKILL)
        results = [stream.result() for stream in streams]
        assert {r.tokens for r in results} == {reference.generate(prompt, 60)}
        assert sorted(r.attempts for r in results) == [1, 2]


def test_worker_killed_while_publishing(
    make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str], reference: Reference
) -> None:
    """FINDINGS row 15: what it had created and not sealed goes, and the context is made by another."""
    faults = ("w0.0:kill-seal", "w1.0:slow-prefill=1")
    config = make_config(name=new_pool_name(), workers=1, faults=faults)
    with running(config) as pool, Client(pool.config.address) as client:
        made = client.create_context(STORY, name="inn")
        assert made.created and pool.restarts == 1
        objects = shm.list_objects(store_key(config.name))
        assert sum(found.n_bytes for found in objects) == client.stats().store_bytes == made.context.bytes
        assert len(objects) <= 2
        assert client.generate(context="inn", max_tokens=4, ignore_eog=True).tokens == reference.generate(ids(client, STORY), 4)


def test_request_that_kills_every_worker_is_refused(
    make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str]
) -> None:
    """FINDINGS row 14: an error within its attempts, and a pool that goes on."""
    config = make_config(name=new_pool_name(), workers=1, faults=("w0.0:kill-score", "w0.1:kill-score"))
    with running(config) as pool, Client(pool.config.address) as client:
        with pytest.raises(errors.WorkerLost):
            client.score(STORY, [" a"])
        assert len(client.score(STORY, [" a"]).labels) == 1
        assert pool.restarts == 2


def test_killed_broker_comes_back_with_the_contexts(
    make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str], reference: Reference
) -> None:
    """FINDINGS rows 5 and 15: after the broker's restart the contexts are adopted, and reuse is real and counted."""
    config = make_config(name=new_pool_name())
    with running(config) as pool, Client(pool.config.address, connect_timeout=30) as client:
        base = client.create_context(STORY, name="base", pin=True).context
        child = client.create_context(OTHER, on="base", name="child").context
        before = pool.pids
        os.kill(before["broker"], signal.SIGKILL)
        until(lambda: len(pool.pids) == 3 and not set(pool.pids.values()) & set(before.values()))
        until(lambda: client.stats().workers == 2)
        until(lambda: len(client.contexts()) == 2)
        found = {c.name: c for c in client.contexts()}
        for was in (base, child):
            now = found[was.name]
            assert (now.id, now.n_tokens, now.parent, now.pinned) == (was.id, was.n_tokens, was.parent, was.pinned)
        prompt = ids(client, STORY, OTHER, SUFFIX)
        answer = client.generate(SUFFIX, context="child", max_tokens=8, ignore_eog=True)
        assert answer.tokens == reference.generate(prompt, 8)
        assert (answer.usage.reused, answer.usage.prefilled) == (child.n_tokens, len(ids(client, SUFFIX)))


def test_client_in_flight_hears_of_a_killed_broker(
    make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str]
) -> None:
    """FINDINGS row 14: no request hangs."""
    config = make_config(name=new_pool_name(), faults=("slow-decode=20",))
    with running(config) as pool, Client(pool.config.address, timeout=None, retries=0) as client:
        stream = client.stream(STORY, max_tokens=500, ignore_eog=True)
        next(stream)
        os.kill(pool.pids["broker"], signal.SIGKILL)
        with pytest.raises(errors.NoAnswer, match="went away"):
            stream.result()


# ---- what cannot work


def test_wrong_requests_are_named_and_change_nothing(client: Client, pool: Supervisor, reference: Reference) -> None:
    client.create_context(STORY, name="inn")
    with pytest.raises(errors.UnknownContext):
        client.generate(SUFFIX, context="nowhere")
    with pytest.raises(errors.TooLong) as long:
        client.generate([1] * 2000)
    assert (long.value.data["tokens"], long.value.data["limit"]) == (2001, 1024)  # one position is for the answer
    with pytest.raises(errors.BadRequest, match="512"):
        client.generate([1, 2, 512])
    with pytest.raises(errors.BadRequest):
        client.score(SUFFIX, [" a", ""], context="inn")
    with pytest.raises(errors.BadRequest):
        client.generate("half a pair: \ud83d")
    with pytest.raises(errors.BadRequest):
        client.create_context("x", name="with\0nul")
    with pytest.raises(errors.UnknownContext):
        client.drop_context("nowhere")
    answer = client.generate(SUFFIX, context="inn", max_tokens=4, ignore_eog=True)
    assert answer.tokens == reference.generate(ids(client, STORY, SUFFIX), 4)
    assert pool.restarts == 0


def test_full_store_says_so_with_figures(make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str]) -> None:
    """FINDINGS rows 16 and 17: bytes are the limit; what is larger is refused before the work, the rest evicts the oldest."""
    config = make_config(name=new_pool_name(), workers=1, memory=256 << 10)
    with running(config) as pool, Client(pool.config.address) as client:
        sizes = []
        for i in range(6):
            sizes.append(client.create_context(f"{i} {STORY}", name=f"c{i}").context.bytes)
            stats = client.stats()
            assert stats.store_bytes + stats.store_unmapping_bytes <= 256 << 10
        assert stats.evictions > 0 and "c0" not in {c.name for c in client.contexts()}
        with pytest.raises(errors.StoreFull) as full:
            client.create_context(STORY * 8)
        assert full.value.data["limit"] == 256 << 10
        assert int(str(full.value.data["needed"])) > 256 << 10
        assert client.generate(SUFFIX, context="c5", max_tokens=1).usage.reused > 0


# ---- the command


@contextmanager
def server_of(config: PoolConfig) -> Iterator[subprocess.Popen[str]]:
    """`geist-pool` as a process; killed at the end if it is still there."""
    words = [
        "--model",
        config.model,
        "--workers",
        "2",
        "--name",
        config.name,
        "--cache-dir",
        config.cache_dir,
        "--memory",
        "8MiB",
    ]
    code = "from geist_pool.cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True) as server:
        try:
            yield server
        finally:
            server.kill()


def wait_until_serving(server: subprocess.Popen[str]) -> list[str]:
    assert server.stderr is not None
    seen = []
    for line in server.stderr:
        seen.append(line)
        if "Ctrl-C stops it" in line:
            return seen
    raise AssertionError("".join(seen))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_everything(
    make_config: Callable[..., PoolConfig],
    new_pool_name: Callable[[], str],
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while a request is in the works, which gets its one answer."""
    monkeypatch.setenv("GEIST_POOL_FAULTS", "slow-decode=5")  # the request cannot have ended by itself
    config = make_config(name=new_pool_name())
    with server_of(config) as server:
        wait_until_serving(server)
        family = psutil.Process(server.pid).children(recursive=True)
        assert len(family) >= 3
        with Client(pool=config.name) as client:
            client.create_context(STORY, name="inn")
            stream = client.stream(STORY, max_tokens=900, ignore_eog=True)
            next(stream)
            server.send_signal(number)
            with pytest.raises((errors.Stopping, errors.NoAnswer)):
                stream.result()
        _, err = server.communicate(timeout=60)
        assert server.returncode == 0 and "Traceback" not in err, err
    psutil.wait_procs(family, timeout=30)
    assert not [p for p in family if p.is_running()]
    assert shm.list_objects(store_key(config.name)) == []


def test_killed_server_leaves_nothing_that_the_next_one_minds(
    make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str]
) -> None:
    """FINDINGS rows 14 and 15: no orphan after SIGKILL of the supervisor, residue adopted or removed."""
    config = make_config(name=new_pool_name())
    with server_of(config) as server:
        wait_until_serving(server)
        family = psutil.Process(server.pid).children(recursive=True)
        with Client(pool=config.name) as client:
            client.create_context(STORY, name="inn")
        server.kill()
        server.communicate()
    _gone, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    with running(config) as pool, Client(pool.config.address) as client:
        assert client.generate(STORY, max_tokens=1).usage.generated == 1


def test_commands_talk_to_a_pool(pool: Supervisor, tmp_path: Path) -> None:
    def gp(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from geist_pool.cli import main; main()", "--name", NAME, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    (tmp_path / "story.txt").write_text(STORY)
    made = gp("contexts", "create", "inn", str(tmp_path / "story.txt"))
    assert (made.returncode, made.stderr) == (0, "") and made.stdout.endswith("created\n")
    assert "inn" in gp("contexts").stdout
    said = gp("ask", "--context", "inn", "--max-tokens", "5", SUFFIX)
    assert said.returncode == 0 and "generated" in said.stderr
    ranked = gp("ask", "--context", "inn", "--label", " yes", "--label", " no", SUFFIX)
    assert ranked.returncode == 0 and len(ranked.stdout.splitlines()) == 2
    assert gp("contexts", "drop", "inn").returncode == 0
    lost = gp("ask", "--context", "inn", SUFFIX)
    assert lost.returncode == 1 and lost.stderr.startswith("error: ") and "inn" in lost.stderr
    assert "tokens_generated" in gp("stats").stdout


def test_second_server_of_the_name_refuses(pool: Supervisor, make_config: Callable[..., PoolConfig]) -> None:
    with server_of(make_config(name=NAME)) as second:
        _, err = second.communicate(timeout=60)
        assert second.returncode == 3
        assert f"running already (process {os.getpid()})" in err


def test_threads_of_one_process_take_a_client_each(pool: Supervisor, client: Client) -> None:
    """Twenty short-lived clients at a time: connections come and go, every request ends."""
    answers: list[int] = []

    def one() -> None:
        with Client(pool.config.address) as own:
            answers.append(len(own.tokenize(STORY).tokens))

    threads = [threading.Thread(target=one) for _ in range(20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert answers == [len(ids(client, STORY))] * 20

"""Contexts that come from answers and files, through the whole pool on a tiny hybrid model.

Property: a published, saved and loaded, or adopted context is the state that a fresh session has after exactly its tokens, bit
for bit; samples are those of their own streams; a request that is sent again is not computed again. Tolerance: none. Reason: a
game goes on for hours from states that nobody computed in one go.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from geist_pool import config as settings
from geist_pool import engine
from geist_pool.client import Client
from geist_pool.config import PoolConfig, store_key
from geist_pool.protocol import Generate, Publish, Reply, Sampling, encode
from geist_pool.store import shm
from geist_pool.supervisor import Supervisor

STORY = "Hesper keeps the inn on the wrong bank, Odo keeps the ferry, and the river keeps what falls in. " * 3
NAME = f"keep-{os.getpid()}"
LABELS = (" yes", " no", " the river keeps")


@pytest.fixture(scope="module")
def config(tiny_model: Callable[..., Path], packed_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolConfig]:
    saved = tmp_path_factory.mktemp("saved")
    with tempfile.TemporaryDirectory(prefix="gp-") as run, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", run)
        yield PoolConfig(
            name=NAME, model=str(tiny_model("qwen35-tiny")), workers=2, cache_dir=str(packed_dir), memory=64 << 20,
            log_level="error", pin_cores=False, saved_dir=str(saved),
        )  # fmt: skip


@pytest.fixture(scope="module")
def model(config: PoolConfig) -> Iterator[engine.Model]:
    with engine.Engine("auto", 1) as e, engine.Model(e, Path(config.model), cache_dir=Path(config.cache_dir)) as m:
        yield m


@contextmanager
def running(config: PoolConfig) -> Iterator[Supervisor]:
    with Supervisor(config) as pool:
        yield pool
    assert shm.list_objects(store_key(config.name)) == []


@pytest.fixture(scope="module")
def pool(config: PoolConfig) -> Iterator[Supervisor]:
    with running(config) as made:
        yield made


@pytest.fixture
def client(pool: Supervisor) -> Iterator[Client]:
    with Client(pool.config.address, timeout=60) as made:
        yield made
        for context in made.contexts():
            made.drop_context(context.id)


def ids(client: Client, *texts: str) -> tuple[int, ...]:
    return tuple(t for text in texts for t in client.tokenize(text).tokens)


def check_state(client: Client, model: engine.Model, context: str, tokens: tuple[int, ...]) -> None:
    """Whole labels scored from the context have, bit for bit, the log-probabilities that they have behind its tokens."""
    got = client.score(None, LABELS, context=context)
    assert got.usage.reused == len(tokens) and got.usage.prefilled == 0
    for label in got.labels:
        with engine.Session(model) as session:
            session.prefill(tokens)
            assert label.logprobs == tuple(float(x) for x in session.score(label.tokens))


def test_published_answer(client: Client, model: engine.Model) -> None:
    client.create_context(STORY, name="story")
    got = client.generate(" Nip says:", context="story", max_tokens=70, ignore_eog=True, publish=Publish(name="told"))
    assert got.publish_error is None and got.published is not None and got.published.name == "told"
    tokens = ids(client, STORY, " Nip says:") + got.tokens
    assert got.published.n_tokens == len(tokens)
    check_state(client, model, "told", tokens)
    assert client.stats().store_bytes == sum(f.n_bytes for f in shm.list_objects(store_key(NAME)))


def test_answer_that_ends_inside_a_token(client: Client, model: engine.Model) -> None:
    """A stop string that begins with the last byte of a token: the context is that of the text, byte for byte."""
    whole = client.generate(STORY, max_tokens=12, ignore_eog=True)
    pieces = [model.token_bytes(t) for t in whole.tokens]
    cut = next(
        i for i in range(2, 12) if len(pieces[i]) > 1 and (pieces[i][-1:] + pieces[i + 1]).isascii() and pieces[i].isascii()
    )
    stop = (pieces[cut][-1:] + pieces[cut + 1]).decode()
    got = client.generate(STORY, max_tokens=12, ignore_eog=True, stop=[stop], publish=Publish(name="cut"))
    assert got.stop == stop and got.published is not None, got.publish_error
    text = got.raw
    n = next(i for i in range(len(got.tokens) + 1) if len(b"".join(map(model.token_bytes, got.tokens[: i + 1]))) > len(text))
    rest = text[len(b"".join(map(model.token_bytes, got.tokens[:n]))) :].decode()
    tokens = ids(client, STORY) + got.tokens[:n] + (ids(client, rest) if rest else ())
    check_state(client, model, "cut", tokens)


def test_samples(client: Client) -> None:
    sampling = Sampling(temperature=1.5, seed=11, stream=4)
    client.create_context(STORY, name="story")
    got = client.generate(context="story", max_tokens=8, ignore_eog=True, n=3, sampling=sampling)
    for i, sample in enumerate(got.samples):
        one = client.generate(
            context="story", max_tokens=8, ignore_eog=True, sampling=msgspec.structs.replace(sampling, stream=4 + i)
        )
        assert one.tokens == sample.tokens
    assert len({s.tokens for s in got.samples}) > 1


def test_saved_dropped_and_loaded(client: Client, model: engine.Model) -> None:
    client.create_context(STORY, name="story")
    client.create_context(STORY, on="story", name="a/b ü", pin=True)
    info = client.save_context("a/b ü")
    (listed,) = client.saved_contexts()
    assert info.saved == "a/b ü" and msgspec.structs.replace(listed, written=info.written) == info
    for context in client.contexts():
        client.drop_context(context.id)
    back = client.load_context("a/b ü", name="back")
    tokens = ids(client, STORY, STORY)
    assert back.created and (back.context.name, back.context.parent, back.context.n_tokens) == ("back", None, len(tokens))
    check_state(client, model, "back", tokens)
    assert not client.load_context("a/b ü").created


def test_the_same_request_from_another_connection(pool: Supervisor) -> None:
    """Its reply was lost with the connection: the answer, drawn without a seed, is the same one and was computed once."""
    body = encode(Generate(text=STORY, max_tokens=6, ignore_eog=True, sampling=Sampling(temperature=2.0)))
    replies: list[Reply] = []
    before = pool_stats(pool).tokens_generated
    with zmq.Context() as context:
        for _ in range(2):
            with context.socket(zmq.DEALER) as socket:
                socket.linger, socket.rcvtimeo = 0, 60_000
                socket.connect(pool.config.address)
                socket.send_multipart([b"GP1", b"the very same", body])
                replies.append(msgspec.msgpack.decode(socket.recv_multipart()[2], type=Reply))
    assert replies[0] == replies[1] and replies[0].ok
    after = pool_stats(pool)
    assert after.tokens_generated - before == 6 and after.replies_replayed == 1


def pool_stats(pool: Supervisor):  # type: ignore[no-untyped-def]
    with Client(pool.config.address, timeout=60) as client:
        return client.stats()


def test_killed_broker_adopts_a_context_whose_ancestor_was_dropped(config: PoolConfig, model: engine.Model) -> None:
    """FINDINGS row 15: of an ancestor only the blocks are needed."""
    config = msgspec.structs.replace(config, name=f"{NAME}-b")
    with running(config) as pool, Client(pool.config.address, timeout=60, connect_timeout=60) as client:
        client.create_context(STORY, name="root")
        client.create_context(STORY, on="root", name="leaf")
        client.drop_context("root")
        tokens = ids(client, STORY, STORY)
        before = pool.pids
        os.kill(before["broker"], signal.SIGKILL)
        end = time.monotonic() + 60
        while not (len(pool.pids) == 3 and not set(pool.pids.values()) & set(before.values())):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert [c.name for c in client.contexts()] == ["leaf"]
        check_state(client, model, "leaf", tokens)
        assert client.stats().store_orphaned_bytes > 0
        client.drop_context("leaf")
        while client.stats().store_bytes:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert shm.list_objects(store_key(config.name)) == []


def test_killed_broker_knows_what_contexts_were_called_last(config: PoolConfig) -> None:
    """A name that was given to an older context again, a second name, a pin; the last to go removes what was written down."""
    config = msgspec.structs.replace(config, name=f"{NAME}-n")
    with running(config) as pool, Client(pool.config.address, timeout=60, connect_timeout=60) as client:
        older = client.create_context(STORY, name="first").context.id
        younger = client.create_context(STORY + "More.", name="hero").context.id
        client.create_context(STORY, name="hero", pin=True)
        time.sleep(1.0)  # until it is written down
        before = pool.pids
        os.kill(before["broker"], signal.SIGKILL)
        end = time.monotonic() + 60
        while not (len(pool.pids) == 3 and not set(pool.pids.values()) & set(before.values())):
            assert time.monotonic() < end
            time.sleep(0.01)
        found = {c.id: (c.names, c.pinned) for c in client.contexts()}
        assert found == {older: (("first", "hero"), True), younger: ((), False)}
    assert not [p for p in settings.socket_dir(settings.read_environment()).iterdir() if p.name.startswith(config.name)]

"""Both clients against a real pool on a tiny hybrid model.

Property: the asynchronous client's answers are the blocking one's; a request outlives the broker, and its reader sees every token
once; a request sent again is not computed again while the pool remembers it; a cancelled task frees its worker. Tolerance: none.
Reason: what a scripted broker promises the clients has to be what the real one does.
"""

from __future__ import annotations

import asyncio
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
from pool_kit import until

from geist_pool import protocol
from geist_pool.client import AsyncClient, Client, Publish, Sampling
from geist_pool.config import PoolConfig, store_key
from geist_pool.errors import DeadlineExceeded
from geist_pool.protocol import GenerateResult
from geist_pool.store import shm
from geist_pool.supervisor import Supervisor

WORLD = "The ferry does not cross at night. Hesper keeps the inn on the wrong bank, and Odo keeps the ferry."
NAMES = ["Odo", "Nip", "Hesper", "Wilmot", "Ansel", "Maud", "Hob", "Sabra"]
WARM = Sampling(temperature=1.2, top_k=50, seed=11)


@pytest.fixture
def start(
    tiny_model: Callable[..., Path], packed_dir: Path, new_pool_name: Callable[[], str]
) -> Iterator[Callable[..., Supervisor]]:
    """Starts pools of two workers; nothing of them may be left."""
    with tempfile.TemporaryDirectory(prefix="gp-") as run, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", run)

        @contextmanager
        def make(**changes: object) -> Iterator[Supervisor]:
            fields = {"model": str(tiny_model("qwen35-tiny")), "workers": 2, "cache_dir": str(packed_dir), "memory": 64 << 20}
            fields |= {"name": new_pool_name(), "log_level": "error", "pin_cores": False}
            config = PoolConfig(**{**fields, **changes})
            with Supervisor(config) as pool:
                yield pool
            assert shm.list_objects(store_key(config.name)) == []

        yield make  # type: ignore[misc]


def test_a_whole_evening_is_the_same_with_both_clients(start: Callable[..., Supervisor]) -> None:
    """FINDINGS rows 3 and 9: eight at a time over one connection, and one after another."""

    async def together(address: str) -> list[object]:
        async with AsyncClient(address, space="a") as pool:
            await pool.create_context(WORLD, name="world")
            await asyncio.gather(*(pool.create_context(f" {name} waits.", on="world", name=name) for name in NAMES))
            said = await asyncio.gather(
                *(
                    pool.generate(
                        f" {n} says:", context=n, max_tokens=12, sampling=WARM, publish=Publish(name=n), ignore_eog=True
                    )
                    for n in NAMES
                )
            )
            chosen = await asyncio.gather(*(pool.score(" Then", [" rain", " more rain"], context=n) for n in NAMES))
            streams = [pool.stream(" And", context=n, max_tokens=9, ignore_eog=True) for n in NAMES]
            told = await asyncio.gather(*(collect(stream) for stream in streams))
            return [*((s.tokens, s.text, s.usage) for s in said), *(c.labels for c in chosen), *told]

    async def collect(stream: object) -> tuple[str, tuple[int, ...]]:
        texts = [chunk.text async for chunk in stream]  # type: ignore[attr-defined]
        return "".join(texts), (await stream.result()).tokens  # type: ignore[attr-defined]

    def alone(address: str) -> list[object]:
        with Client(address, space="b") as pool:
            pool.create_context(WORLD, name="world")
            for name in NAMES:
                pool.create_context(f" {name} waits.", on="world", name=name)
            said = [
                pool.generate(f" {n} says:", context=n, max_tokens=12, sampling=WARM, publish=Publish(name=n), ignore_eog=True)
                for n in NAMES
            ]
            assert all(s.published is not None and s.published.name == n for s, n in zip(said, NAMES, strict=True))
            chosen = [pool.score(" Then", [" rain", " more rain"], context=n) for n in NAMES]
            told = [pool.generate(" And", context=n, max_tokens=9, ignore_eog=True) for n in NAMES]
            return [
                *((s.tokens, s.text, s.usage) for s in said),
                *(c.labels for c in chosen),
                *((t.text, t.tokens) for t in told),
            ]

    with start() as pool:
        assert asyncio.run(together(pool.config.address)) == alone(pool.config.address)


def test_streams_outlive_the_broker(start: Callable[..., Supervisor]) -> None:
    """FINDINGS row 14: killed in the middle, started anew, the same tokens, once each; also drawn ones."""

    async def main(pool: Supervisor) -> None:
        async with AsyncClient(pool.config.address, connect_timeout=60) as client:
            whole = await client.generate(WORLD, max_tokens=60, ignore_eog=True, sampling=WARM)
            streams = [client.stream(WORLD, max_tokens=60, ignore_eog=True, sampling=WARM) for _ in range(2)]
            seen: list[list[protocol.GenerateChunk]] = []
            for stream in streams:
                seen.append([await anext(stream)])
            asked = asyncio.create_task(client.generate(WORLD, max_tokens=60, ignore_eog=True, sampling=WARM))
            os.kill(pool.pids["broker"], signal.SIGKILL)
            for stream, chunks in zip(streams, seen, strict=True):
                chunks += [chunk async for chunk in stream]
                assert tuple(t for c in chunks for t in c.tokens) == whole.tokens == (await stream.result()).tokens
                assert "".join(c.text for c in chunks) == whole.text
            assert (await asked).tokens == whole.tokens

    with start(faults=("slow-decode=10",)) as pool:
        asyncio.run(main(pool))


def test_blocking_client_outlives_the_broker(start: Callable[..., Supervisor]) -> None:
    with start(faults=("slow-decode=10",)) as pool, Client(pool.config.address, connect_timeout=60) as client:
        whole = client.generate(WORLD, max_tokens=40, ignore_eog=True)
        with client.stream(WORLD, max_tokens=40, ignore_eog=True) as stream:
            chunks = [next(stream)]
            os.kill(pool.pids["broker"], signal.SIGKILL)
            chunks += stream
        assert tuple(t for c in chunks for t in c.tokens) == whole.tokens


def test_request_sent_again_is_not_computed_again(start: Callable[..., Supervisor]) -> None:
    """Under another connection, as after a break: the answer comes from memory, once for each sending."""
    request = protocol.encode(protocol.Generate(text=WORLD, max_tokens=5, sampling=WARM))
    decode = msgspec.msgpack.Decoder(protocol.Reply).decode
    replies = []
    with start() as pool, Client(pool.config.address) as client:
        for _ in range(2):
            with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
                dealer.linger, dealer.rcvtimeo = 0, 60_000
                dealer.connect(pool.config.address)
                dealer.send_multipart((protocol.MAGIC, b"one-and-the-same", request))
                replies.append(decode(dealer.recv_multipart()[2]))
        assert all(isinstance(r.result, GenerateResult) for r in replies)
        assert replies[0] == replies[1]
        stats = client.stats()
        assert stats.replies_replayed == 1
        assert stats.tokens_generated == len(replies[0].result.tokens)


@contextmanager
def dealer_to(address: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvtimeo = 0, 60_000
        dealer.connect(address)
        yield dealer


@pytest.mark.parametrize("comes_back", [True, False])
def test_broken_connection_in_the_middle(start: Callable[..., Supervisor], comes_back: bool) -> None:
    """A client that is back within a second finds its request at work, computed once; of one that stays away it ends."""
    n = 60
    message = (protocol.MAGIC, b"mine", protocol.encode(protocol.Generate(text=WORLD, max_tokens=n, ignore_eog=True)))
    with start(faults=("slow-decode=50",)) as pool, Client(pool.config.address) as client:
        with dealer_to(pool.config.address) as dealer:
            dealer.send_multipart(message)
            until(lambda: client.stats().workers_busy == 1)
        if comes_back:
            with dealer_to(pool.config.address) as dealer:
                dealer.send_multipart(message)
                reply = msgspec.msgpack.decode(dealer.recv_multipart()[2], type=protocol.Reply)
            assert isinstance(reply.result, GenerateResult) and reply.result.finish_reason == "length"
            assert len(reply.result.tokens) == n == client.stats().tokens_generated
        else:
            until(lambda: client.stats().workers_busy == 0)
            assert client.stats().tokens_generated < n


def test_long_silence_does_no_harm(start: Callable[..., Supervisor]) -> None:
    """Asked again and again while the first is at work: it is done once."""
    with start(faults=("slow-decode=20",)) as pool, Client(pool.config.address, resend_after=0.05) as client:
        answer = client.generate(WORLD, max_tokens=40, ignore_eog=True)
        assert len(answer.tokens) == 40 == client.stats().tokens_generated
        assert client.stats().requests["generate"] > 1


def test_cancelled_tasks_free_their_workers(start: Callable[..., Supervisor]) -> None:
    """FINDINGS row 18: those that run and those that wait."""

    async def main(address: str) -> None:
        async with AsyncClient(address) as client:
            doomed = [asyncio.create_task(client.generate(WORLD, max_tokens=900, ignore_eog=True)) for _ in range(6)]
            while (await client.stats()).workers_busy < 2:
                await asyncio.sleep(0.01)
            for task in doomed:
                task.cancel()
            await asyncio.gather(*doomed, return_exceptions=True)
            end = time.monotonic() + 60
            while (stats := await client.stats()).workers_busy or stats.queue:
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            assert (await client.generate(WORLD, max_tokens=3, ignore_eog=True)).usage.generated == 3

    with start(faults=("slow-decode=10",)) as pool:
        asyncio.run(main(pool.config.address))


def test_deadline_ends_with_what_there_is(start: Callable[..., Supervisor]) -> None:
    with start(faults=("slow-decode=10",)) as pool, Client(pool.config.address) as client:
        client.create_context(WORLD, name="w")
        late = client.generate(context="w", max_tokens=900, ignore_eog=True, deadline_ms=500)
        assert late.finish_reason == "deadline" and 1 <= len(late.tokens) < 900
        with pytest.raises(DeadlineExceeded):
            client.score(WORLD * 4, [" a" * 40] * 200, deadline_ms=1)


def test_samples_differ_by_their_stream_alone(start: Callable[..., Supervisor]) -> None:
    with start() as pool, Client(pool.config.address) as client:
        several = client.generate(WORLD, max_tokens=10, n=3, sampling=WARM, ignore_eog=True)
        for i, sample in enumerate(several.samples):
            own = Sampling(temperature=1.2, top_k=50, seed=11, stream=i)
            assert client.generate(WORLD, max_tokens=10, sampling=own, ignore_eog=True).tokens == sample.tokens
        with client.stream(WORLD, max_tokens=10, n=3, sampling=WARM, ignore_eog=True) as stream:
            chunks = list(stream)
            assert stream.result().samples == several.samples
        for i, sample in enumerate(several.samples):
            assert tuple(t for c in chunks if c.sample == i for t in c.tokens) == sample.tokens
            assert "".join(c.text for c in chunks if c.sample == i) == sample.text


def test_silence_in_a_stream_is_not_seen(start: Callable[..., Supervisor]) -> None:
    """Asked again while it runs, a stream brings everything so far once more; its reader has it once."""
    with start(faults=("slow-decode=100",)) as pool, Client(pool.config.address, resend_after=0.05) as client:
        with client.stream(WORLD, max_tokens=12, ignore_eog=True) as stream:
            chunks = list(stream)
        at = 0
        for chunk in chunks:
            assert chunk.index == at
            at += len(chunk.tokens)
        assert "".join(c.text for c in chunks) == stream.result().text
        assert client.stats().requests["generate"] > 1 and client.stats().tokens_generated == 12

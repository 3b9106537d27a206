"""What only the asynchronous client can do.

Property: any number of requests in flight, each with its own answer; a cancelled task cancels its request and nobody else's;
closing ends whatever waits; both clients have the same operations with the same arguments. Tolerance: none. Reason: a runtime of
agents lives on hundreds of waiting tasks, some of which it gives up.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest

from geist_pool import protocol
from geist_pool.client import AsyncClient, AsyncStream, Client, Stream, calls
from geist_pool.errors import NoAnswer
from geist_pool.protocol import Cancel, Generate, GenerateChunk, Reply, Request, Tokenize

Send = Callable[[bytes, Reply | bytes], None]


def public(cls: type) -> dict[str, object]:
    return {name: it for name, it in vars(cls).items() if not name.startswith("_")}


@pytest.mark.parametrize(("blocking", "other"), [(Client, AsyncClient), (Stream, AsyncStream)])
def test_both_have_the_same_surface(blocking: type, other: type) -> None:
    ours, theirs = public(blocking), public(other)
    assert set(theirs) - set(ours) == ({"start"} if other is AsyncStream else set())
    assert set(ours) <= set(theirs)
    for name, method in ours.items():
        if callable(method):
            one, two = inspect.signature(method), inspect.signature(theirs[name])  # type: ignore[arg-type]
            assert list(one.parameters.values()) == list(two.parameters.values()), name
            back = str(one.return_annotation)
            assert str(two.return_annotation) in (back, f"Async{back}"), name
    one, two = inspect.signature(blocking), inspect.signature(other)
    if blocking is Client:
        assert list(one.parameters.values()) == list(two.parameters.values())


def test_every_operation_of_the_wire_has_a_method_and_every_field_an_option() -> None:
    """A field that is added to a request has to be added here too."""
    options = {
        protocol.Info: ("info", calls.Options, set()),
        protocol.Stats: ("stats", calls.Options, set()),
        protocol.Story: ("story", calls.Options, {"id"}),
        protocol.Tokenize: ("tokenize", calls.TokenizeOptions, {"text"}),
        protocol.ContextCreate: ("create_context", calls.CreateOptions, {"text", "messages", "tokens"}),
        protocol.ContextList: ("contexts", calls.Options, set()),
        protocol.ContextGet: ("context", calls.Options, {"context"}),
        protocol.ContextDrop: ("drop_context", calls.Options, {"context"}),
        protocol.ContextSave: ("save_context", calls.SaveOptions, {"context"}),
        protocol.ContextLoad: ("load_context", calls.LoadOptions, {"saved"}),
        protocol.ContextSaved: ("saved_contexts", calls.Options, set()),
        protocol.Generate: ("generate", calls.GenerateOptions, {"text", "messages", "tokens", "stream"}),
        protocol.Score: ("score", calls.ScoreOptions, {"text", "messages", "tokens", "labels"}),
        protocol.Cancel: ("cancel", calls.Options, {"id"}),
    }
    assert set(options) == set(get_args(protocol.Request))
    for request, (method, keywords, positional) in options.items():
        assert set(request.__struct_fields__) - {"space"} - positional == set(get_type_hints(keywords)), request
        assert callable(getattr(Client, method)) and callable(getattr(AsyncClient, method))


def test_many_in_flight_get_their_own_answers(tmp_path: Path, script: SimpleNamespace) -> None:
    """Answered in reverse, so that order is no help."""
    waiting: list[tuple[bytes, str]] = []

    def reverse(rid: bytes, request: Request, send: Send) -> None:
        assert isinstance(request, Tokenize)
        waiting.append((rid, request.text))
        if len(waiting) == 500:
            for each, text in reversed(waiting):
                send(each, script.tokens_of(text))

    async def main(address: str) -> None:
        async with AsyncClient(address) as client:
            texts = [f"request {i}" for i in range(500)]
            answers = await asyncio.gather(*(client.tokenize(text) for text in texts))
            assert [a.tokens for a in answers] == [tuple(text.encode()) for text in texts]
            assert client.discarded == 0

    with script.serving(tmp_path, reverse) as pool:
        asyncio.run(main(pool.address))


def test_cancelled_task_cancels_its_request_alone(tmp_path: Path, script: SimpleNamespace) -> None:
    held: list[bytes] = []

    def hold(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Tokenize):
            held.append(rid)
        elif isinstance(request, Cancel):
            send(held[1], script.tokens_of("other"))

    async def main(address: str) -> None:
        async with AsyncClient(address) as client:
            doomed = asyncio.create_task(client.tokenize("doomed"))
            while not held:
                await asyncio.sleep(0.01)
            other = asyncio.create_task(client.tokenize("other"))
            while len(held) < 2:
                await asyncio.sleep(0.01)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            assert (await other).tokens == tuple(b"other")

    with script.serving(tmp_path, hold) as pool:
        asyncio.run(main(pool.address))
        cancels = [r.id for _, r in pool.seen if isinstance(r, Cancel)]
        assert cancels == [held[0].decode()]


def test_closing_ends_what_waits_and_cancels_it(tmp_path: Path, script: SimpleNamespace) -> None:
    async def main(address: str) -> list[str]:
        client = AsyncClient(address)
        waiting = [asyncio.create_task(client.tokenize(str(i), timeout=None)) for i in range(3)]
        async with client.stream("x") as stream:
            while len(pool.seen) < 4:
                await asyncio.sleep(0.01)
            await client.close()
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert [str(e) for e in ends] == ["this client is closed"] * 3
            with pytest.raises(NoAnswer, match="closed"):
                await anext(stream)
            with pytest.raises(NoAnswer, match="closed"):
                await client.info()
            return [stream.id]

    with script.serving(tmp_path, lambda rid, request, send: None) as pool:
        streams = asyncio.run(main(pool.address))
        pool.wait_for(Cancel)
        for _ in range(200):
            if len(pool.seen) == 8:
                break
            pool.pause()
        cancelled = {r.id for _, r in pool.seen if isinstance(r, Cancel)}
        assert cancelled == {rid.decode() for rid, r in pool.seen if not isinstance(r, Cancel)} >= set(streams)


def test_stream_left_early_is_cancelled(tmp_path: Path, script: SimpleNamespace) -> None:
    def one_chunk(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Generate):
            send(rid, Reply(ok=True, result=GenerateChunk(0, (5,), "h"), final=False))

    async def main(address: str) -> str:
        async with AsyncClient(address) as client:
            async with client.stream("x") as stream:
                async for chunk in stream:
                    assert chunk.text == "h"
                    break
            return stream.id

    with script.serving(tmp_path, one_chunk) as pool:
        left = asyncio.run(main(pool.address))
        cancel = pool.wait_for(Cancel)[1]
        assert isinstance(cancel, Cancel) and cancel.id == left


def test_client_belongs_to_one_loop(tmp_path: Path, script: SimpleNamespace) -> None:
    async def ask(client: AsyncClient) -> None:
        assert (await client.tokenize("a")).tokens == (97,)

    with script.serving(tmp_path, script.echo) as pool:
        client = AsyncClient(pool.address)
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(ask(client))
            with pytest.raises(RuntimeError, match="event loop"):
                asyncio.run(ask(client))
            loop.run_until_complete(client.close())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()


def test_connection_that_breaks_just_before_a_send_is_waited_for(
    tmp_path: Path, script: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket says that it can be written to, and a moment later it cannot."""
    sends: list[bool] = []

    async def main(address: str) -> None:
        async with AsyncClient(address) as client:
            send_now = client._send_now
            monkeypatch.setattr(client, "_send_now", lambda frames: sends.append(True) or (len(sends) > 2 and send_now(frames)))
            assert (await client.tokenize("a")).tokens == (97,)

    with script.serving(tmp_path, script.echo) as pool:
        asyncio.run(main(pool.address))
    assert len(sends) == 3


def test_lost_connection_sends_all_again(tmp_path: Path, script: SimpleNamespace) -> None:
    async def main(first: object, address: str) -> None:
        async with AsyncClient(address, timeout=20, resend_after=3600) as client:
            waiting = [asyncio.create_task(client.tokenize(str(i))) for i in range(50)]
            while len(first.seen) < 50:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
            await asyncio.to_thread(first.close)  # type: ignore[attr-defined]
            second = script.Pool(address, script.echo)
            try:
                answers = await asyncio.gather(*waiting)
            finally:
                await asyncio.to_thread(second.close)
            assert [bytes(a.tokens).decode() for a in answers] == [str(i) for i in range(50)]
            assert sorted(rid for rid, _ in first.seen) == sorted(rid for rid, _ in second.seen)  # type: ignore[attr-defined]

    first = script.Pool(f"ipc://{tmp_path / 'pool.ipc'}", lambda rid, request, send: None)
    asyncio.run(main(first, first.address))


def test_no_reply_is_overlooked_behind_a_send(tmp_path: Path, script: SimpleNamespace) -> None:
    """The socket's descriptor tells of a reply once, and a send may take that word: then the reply would lie there unread."""
    held: list[bytes] = []
    go = threading.Event()

    def hold(rid: bytes, request: Request, send: Send) -> None:
        if isinstance(request, Tokenize):
            held.append(rid)
            go.wait()
            send(rid, script.tokens_of("a"))

    async def main(address: str) -> None:
        async with AsyncClient(address, timeout=10, retries=0) as client:
            stream = await client.stream("x").start()
            asked = asyncio.create_task(client.tokenize("a"))
            while not held:
                await asyncio.sleep(0.01)
            go.set()
            time.sleep(0.3)  # the reply arrives while this loop does something else
            await stream.close()  # which sends, and waits for nothing
            assert (await asked).tokens == (97,)

    with script.serving(tmp_path, hold) as pool:
        asyncio.run(main(pool.address))

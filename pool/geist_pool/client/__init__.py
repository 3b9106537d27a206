"""Clients of a pool: `Client` for one thread, `AsyncClient` for one event loop, with the same operations.

    with Client() as pool:
        pool.create_context(open("tavern.txt").read(), name="tavern")
        answer = pool.generate("\\nThe innkeeper says:", context="tavern", max_tokens=32)
        choice = pool.score("\\nThe mood is", [" tense", " merry"], context="tavern")

Keywords are the wire's field names. Every failure is a `GeistPoolError`: the pool's own errors under their classes of
`geist_pool.errors`, and `NoAnswer` where nothing came in time or the pool went away and did not come back.

A request is sent again, under its id and with the same bytes, when the connection broke before its answer or when nothing was
heard of it for long; a pool that remembers the id does not run it twice. A seed that the caller leaves open is drawn here, so
that a second run of the same request has the same answer.

`calls.py` builds requests, `wire.py` says what happens between a request and its answer; `sync.py` and `aio.py` move frames.
"""

from geist_pool.client.aio import AsyncClient, AsyncStream
from geist_pool.client.calls import Prompt, TemplateArgs
from geist_pool.client.sync import Client, Stream
from geist_pool.protocol import Message, Publish, Sampling

__all__ = ["AsyncClient", "AsyncStream", "Client", "Message", "Prompt", "Publish", "Sampling", "Stream", "TemplateArgs"]

"""A worker with an empty engine, so that what a request costs is what the broker costs.

It speaks the whole protocol of a worker and computes nothing: an answer is token 0 over and over, a context is made without a
byte of shared memory, and every word goes back at once. The supervisor starts it in a worker's place: `python -m bench.empty
CONFIG`."""

from __future__ import annotations

import os
import sys

import zmq

from bench.relay import linger_free
from geist_pool import lifeline
from geist_pool.config import WorkerConfig, worker_config
from geist_pool.protocol import (
    PROTOCOL_VERSION,
    Announce,
    Assign,
    CreateDone,
    CreateWork,
    Done,
    Forget,
    Forgotten,
    FromWorker,
    GenerateDone,
    GenerateWork,
    Geometry,
    Hello,
    Mapped,
    Ping,
    Pong,
    ScoreDone,
    ScoreWork,
    Timings,
    ToWorker,
    Usage,
    Work,
    encode,
    to_worker_decoder,
)

N_CTX = 8192
GEOMETRY = Geometry(header_bytes=4096, n_vocab=49152, recurrent_bytes=0, kv_bytes_per_token=23040, kv_block_bytes=64 * 23040)
"""SmolLM2's, so that the broker reserves as it would."""


def hello(config: WorkerConfig) -> Hello:
    return Hello(
        worker=config.worker,
        pid=os.getpid(),
        protocol=PROTOCOL_VERSION,
        fingerprint="0" * 64,
        numerics=1,
        image_format=1,
        geometry=GEOMETRY,
        architecture="none",
        n_vocab=GEOMETRY.n_vocab,
        n_ctx=config.n_ctx or N_CTX,
        kv_type=config.kv_type,
        tier="scalar",
        threads=config.threads,
        slots=config.slots,
    )


def result_of(work: Work) -> CreateDone | GenerateDone | ScoreDone:
    if isinstance(work, GenerateWork):
        return GenerateDone((0,) * work.max_tokens, b"." * work.max_tokens, "length", None, None)
    if isinstance(work, ScoreWork):
        return ScoreDone(tuple((-1.0,) * len(label) for label in work.labels))
    if isinstance(work, CreateWork):
        return CreateDone(image_id=1)
    raise SystemExit(f"an empty engine has no {type(work).__name__}")


def answer(message: ToWorker) -> FromWorker | None:
    """What is said to a message; None for the order to stop."""
    if isinstance(message, Assign):
        reused = message.chain[-1].n_tokens if message.chain else 0
        tokens = message.work.tokens if isinstance(message.work, CreateWork | GenerateWork | ScoreWork) else ()
        result = result_of(message.work)
        generated = len(result.tokens) if isinstance(result, GenerateDone) else 0
        usage = Usage(reused=reused, prefilled=len(tokens), generated=generated)
        return Done(message.job, message.attempt, result, usage, Timings())
    if isinstance(message, Announce):
        return Mapped(message.chain[-1].id)
    if isinstance(message, Forget):
        return Forgotten(message.context)
    if isinstance(message, Ping):
        return Pong(message.n)
    return None  # Shutdown; there are no jobs that could be cancelled


def serve(config: WorkerConfig) -> None:
    with linger_free() as context, context.socket(zmq.DEALER) as socket:
        socket.sndhwm = socket.rcvhwm = 0
        socket.connect(config.worker_address)
        socket.send(encode(hello(config)))
        while True:
            word = answer(to_worker_decoder.decode(socket.recv()))
            if word is None:
                return
            socket.send(encode(word))


if __name__ == "__main__":
    given = worker_config(sys.argv[1])
    lifeline.hold(given.parent_fd)
    serve(given)

"""The worker's loop: messages in, one pass after another, messages out.

One thread. Between two passes everything that has come is taken in, so cancelling, pings, announcements and a request to forget
wait for one pass at most. With no job the loop sleeps in poll.
"""

from __future__ import annotations

import logging
import os
from functools import partial

import msgspec
import zmq

from geist_pool.config import WorkerConfig
from geist_pool.engine import IMAGE_FORMAT, NUMERICS, Image, Model, Session
from geist_pool.errors import GeistPoolError, Internal, ProtocolError, Stopping
from geist_pool.protocol import (
    PROTOCOL_VERSION,
    Announce,
    Assign,
    CancelJob,
    Done,
    ErrorBody,
    Failed,
    Forget,
    Forgotten,
    FromWorker,
    Hello,
    Mapped,
    Ping,
    Shutdown,
    encode,
    error_body,
    to_worker_decoder,
)
from geist_pool.worker.batch import Turns
from geist_pool.worker.contexts import ContextCache
from geist_pool.worker.faults import Faults
from geist_pool.worker.gauges import Gauges
from geist_pool.worker.jobs import Job, Room

_log = logging.getLogger("geist_pool.worker.loop")

RECONNECT_MS = 10  # between two tries while the broker is not there yet; at a start the worker is often the first
LINGER_MS = 1000  # for the last words of a worker that stops


class Loop:
    """Holds up to `config.slots` jobs and runs them in turn until `Shutdown`."""

    def __init__(self, config: WorkerConfig, model: Model, socket: zmq.Socket[bytes]) -> None:
        self._config = config
        self._model = model
        self._socket = socket
        self._faults = Faults(config.faults)
        self._gauges = Gauges()
        self._sessions = [Session(model, kv_type=config.kv_type, n_ctx=config.n_ctx) for _ in range(config.slots)]
        self._n_ctx = self._sessions[0].n_ctx
        check = partial(Image.check, fingerprint=model.fingerprint, kv_type=config.kv_type)
        self._contexts = ContextCache(config.store, fingerprint=model.fingerprint, numerics=NUMERICS, verify=check)
        self._room = Room(config.store, model, self._contexts, config.prefill_chunk, self._faults, self._gauges, self._send)
        self._jobs: dict[str, Job] = {}
        self._turns = Turns()
        self._stopping = False

    def run(self) -> None:
        """Says hello and works until told to stop. Raises ProtocolError for a message that is none."""
        self._send(self._hello())
        while not self._stopping:
            self._take_in(wait=not self._jobs)
            turn = self._turns.next()
            if turn is not None and not self._stopping:
                job = self._jobs[turn]
                word = job.step()
                if word is not None:
                    self._end(job, word)
            self._report_forgotten()
        for job in list(self._jobs.values()):
            self._end(job, job.refuse(Stopping("the pool is shutting down")))

    def close(self) -> None:
        """Ends every job without a word, then sessions and mappings."""
        for job in self._jobs.values():
            job.close()
        self._jobs.clear()
        for session in self._sessions:
            session.close()
        self._contexts.close()

    # ---- messages

    def _take_in(self, *, wait: bool) -> None:
        """Handles everything that has come; with `wait` sleeps until something comes."""
        if wait:
            self._socket.poll()
        while not self._stopping and self._socket.poll(0):
            frames = self._socket.recv_multipart()
            try:
                message = to_worker_decoder.decode(frames[-1])
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"not a message for a worker: {error}") from error
            match message:
                case Assign():
                    self._assign(message)
                case CancelJob():
                    self._cancel(message)
                case Announce():
                    self._announce(message)
                case Forget(context=context):
                    self._contexts.forget(context)
                    self._report_forgotten()
                case Ping(n=n):
                    self._send(self._gauges.pong(n, len(self._contexts)))
                case Shutdown():
                    self._stopping = True

    def _assign(self, assign: Assign) -> None:
        if assign.job in self._jobs or not self._sessions:
            error = Internal(f"job {assign.job} is more than the {self._config.slots} that this worker holds, or here already")
            self._send(Failed(assign.job, assign.attempt, error_body(error)))
            return
        job = Job(assign, self._sessions.pop(), self._room)
        self._jobs[job.id] = job
        self._turns.add(job.id)

    def _cancel(self, message: CancelJob) -> None:
        job = self._jobs.get(message.job)
        if job is not None:  # else its last word is on the way already
            self._end(job, job.cancel(message.reason, finish=message.finish))

    def _announce(self, message: Announce) -> None:
        context = message.chain[-1].id
        error: ErrorBody | None = None
        try:
            self._contexts.map(message.chain)
        except GeistPoolError as e:
            # One that is not there was dropped meanwhile; where it should be there, the broker says so.
            _log.log(logging.DEBUG if e.data.get("missing") else logging.WARNING, "context %s cannot be used: %s", context, e)
            error = error_body(e)
        self._send(Mapped(context, error))

    def _end(self, job: Job, word: Done | Failed) -> None:
        """The one place where a job ends."""
        del self._jobs[job.id]
        self._turns.remove(job.id)
        job.close()
        self._sessions.append(job.session)
        self._faults("reply")
        self._send(word)

    def _report_forgotten(self) -> None:
        for context in self._contexts.collect():
            self._send(Forgotten(context))

    def _send(self, message: FromWorker) -> None:
        self._socket.send(encode(message))

    def _hello(self) -> Hello:
        model, config = self._model, self._config
        return Hello(
            worker=config.worker,
            pid=os.getpid(),
            protocol=PROTOCOL_VERSION,
            fingerprint=model.fingerprint,
            numerics=NUMERICS,
            image_format=IMAGE_FORMAT,
            geometry=model.geometry(config.kv_type),
            architecture=model.info.architecture,
            n_vocab=model.info.n_vocab,
            n_ctx=self._n_ctx,
            kv_type=config.kv_type,
            tier=model.engine.tier,
            threads=config.threads,
            slots=config.slots,
        )


def serve(config: WorkerConfig, model: Model) -> None:
    """Connects to the broker and works until told to stop."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, 0)  # a worker's words are few; waiting for the broker would stop its passes
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.connect(config.worker_address)
        loop = Loop(config, model, socket)
        try:
            loop.run()
        finally:
            loop.close()

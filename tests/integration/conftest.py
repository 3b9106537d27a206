"""Fixtures of the tests that run the engine: a model with a hole in it, and a broker made of paper for worker processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from geist_pool import config, protocol
from geist_pool.engine import Engine, Gguf, Model
from geist_pool.store import layout, names

TIMEOUT_MS = 60_000  # far above what anything here takes; a test that waits so long has failed


@pytest.fixture(scope="session")
def nan_model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama-tiny with f32 weights whose token 7 is embedded as NaN; all other tokens are sound."""
    data = bytearray(tiny_model("llama-tiny", "f32").read_bytes())
    with Engine() as engine, Gguf(engine, tiny_model("llama-tiny", "f32")) as gguf:
        tensors = gguf.tensors()
    padded = [-(-t.data_bytes // 32) * 32 for t in tensors]
    start = len(data) - sum(padded)
    index = next(i for i, t in enumerate(tensors) if t.name == "token_embd.weight")
    row = 4 * tensors[index].dims[0]
    at = start + sum(padded[:index]) + 7 * row
    data[at : at + row] = np.full(row // 4, np.nan, np.float32).tobytes()
    path = tmp_path_factory.mktemp("nan") / "nan.gguf"
    path.write_bytes(data)
    return path


@pytest.fixture
def model(tiny_model: Callable[..., Path], packed_dir: Path) -> Iterator[Model]:
    """The same model in this process, as the measure."""
    with Engine("scalar") as engine, Model(engine, tiny_model("qwen35-tiny"), cache_dir=packed_dir) as m:
        yield m


class Worker:
    """A worker process as its broker sees it."""

    def __init__(self, process: subprocess.Popen[bytes], lifeline: int) -> None:
        self.process = process
        self.lifeline = lifeline  # write end of its parent pipe; -1 when closed
        self.identity = b""
        self.hello: protocol.Hello

    def cut_lifeline(self) -> None:
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1


class PaperBroker:
    """The worker's side of a broker: a ROUTER that says what the test says. Everything it hears is in `heard`, in order."""

    def __init__(self, directory: Path, pool: str, model: Path, cache: Path) -> None:
        self.pool = pool
        self._model = model
        self._cache = cache
        self._address = f"ipc://{directory}/w"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(self._address)
        self.workers: list[Worker] = []
        self.heard: list[tuple[bytes, protocol.FromWorker]] = []
        self._n = 0

    def start(self, **settings: object) -> Worker:
        """A new worker that has said hello."""
        self._n += 1
        read, write = os.pipe()
        os.set_inheritable(read, True)
        base = config.WorkerConfig(
            store=self.pool,
            worker=f"w{self._n}",
            worker_address=self._address,
            model_path=str(self._model),
            cache_dir=str(self._cache),
            parent_fd=read,
        )
        text = config.to_json(msgspec.structs.replace(base, **settings))
        call = [sys.executable, "-W", "error", "-m", "geist_pool.worker.main", text]
        worker = Worker(subprocess.Popen(call, pass_fds=[read]), write)
        os.close(read)
        self.workers.append(worker)
        worker.identity, hello = self.receive()
        assert isinstance(hello, protocol.Hello)
        worker.hello = hello
        return worker

    def send(self, worker: Worker, message: protocol.ToWorker) -> None:
        self._socket.send_multipart([worker.identity, protocol.encode(message)])

    def receive(self, timeout_ms: int = TIMEOUT_MS) -> tuple[bytes, protocol.FromWorker]:
        """The next message of any worker."""
        assert self._socket.poll(timeout_ms), "no worker says anything"
        identity, body = self._socket.recv_multipart()
        message = protocol.from_worker_decoder.decode(body)
        self.heard.append((identity, message))
        return identity, message

    def silent(self, timeout_ms: int) -> bool:
        """Whether nothing comes for so long."""
        return not self._socket.poll(timeout_ms)

    def assign(
        self, worker: Worker, work: protocol.Work, chain: protocol.Chain = (), attempt: int = 1, job: str | None = None
    ) -> str:
        """Sends a job; its id."""
        self._n += 1
        job = job or f"j{self._n}"
        self.send(worker, protocol.Assign(job, attempt, chain, work))
        return job

    def last_word(self, job: str) -> protocol.Done | protocol.Failed:
        """Waits for the job's end; what else comes meanwhile is in `heard`."""
        for _, message in self.heard:
            if isinstance(message, protocol.Done | protocol.Failed) and message.job == job:
                return message
        while True:
            _, message = self.receive()
            if isinstance(message, protocol.Done | protocol.Failed) and message.job == job:
                return message

    def run(self, worker: Worker, work: protocol.Work, chain: protocol.Chain = ()) -> protocol.Done:
        """A job to its good end."""
        word = self.last_word(self.assign(worker, work, chain))
        assert isinstance(word, protocol.Done), word
        return word

    def fail(self, worker: Worker, work: protocol.Work, chain: protocol.Chain = ()) -> protocol.ErrorBody:
        """A job to its bad end."""
        word = self.last_word(self.assign(worker, work, chain))
        assert isinstance(word, protocol.Failed), word
        return word.error

    def answer(self, worker: Worker, message: protocol.ToWorker) -> protocol.FromWorker:
        """Sends something that is answered at once; the answer."""
        self.send(worker, message)
        return self.receive()[1]

    def grant(
        self, worker: Worker, n_tokens: int, chain: protocol.Chain = (), attempt: int = 1, *, ceiling: bool = False
    ) -> protocol.Grant:
        """Permission for a new context of so many tokens in all, or at most."""
        self._n += 1
        id, geometry = f"{self._n:012x}", worker.hello.geometry
        first = layout.whole_blocks(chain[-1].n_tokens) if chain else 0
        n_blocks = layout.whole_blocks(n_tokens) - first
        envelope = protocol.Envelope(
            id=id,
            name=None,
            space="default",
            parent=chain[-1].id if chain else None,
            created=0.0,
            ttl_s=None,
            pin=False,
            n_tokens=n_tokens,
            first_block=first,
            n_blocks=n_blocks,
            chain=chain,
        )
        ref = protocol.ContextRef(
            id=id,
            image=names.image_name(self.pool, id, attempt),
            image_bytes=layout.image_object_bytes(geometry, n_tokens, envelope),
            kv=names.kv_name(self.pool, id, attempt) if n_blocks else None,
            kv_bytes=layout.kv_object_bytes(geometry, n_blocks),
            first_block=first,
            n_blocks=n_blocks,
            n_tokens=n_tokens,
        )
        return protocol.Grant(ref, envelope, ceiling)

    def create(self, worker: Worker, tokens: Sequence[int], chain: protocol.Chain = ()) -> protocol.Chain:
        """A sealed context of these tokens behind the chain; its own chain."""
        n = len(tokens) + (chain[-1].n_tokens if chain else 0)
        grant = self.grant(worker, n, chain)
        self.run(worker, protocol.CreateWork(tuple(tokens), grant), chain)
        return (*chain, grant.ref)

    def stop(self, worker: Worker) -> int:
        """Asks the worker to stop; its exit status."""
        self.send(worker, protocol.Shutdown())
        return worker.process.wait(TIMEOUT_MS / 1000)

    def close(self) -> None:
        for worker in self.workers:
            worker.cut_lifeline()
            worker.process.kill()
            worker.process.wait()
        self._socket.close()
        self._context.term()


@pytest.fixture
def paper_broker(
    tmp_path: Path, pool_name: str, tiny_model: Callable[..., Path], packed_dir: Path
) -> Iterator[Callable[..., PaperBroker]]:
    """Makes a broker for a tiny model (by name, or a path). It ends its workers."""
    made: list[PaperBroker] = []

    def make(model: str | Path = "qwen35-tiny") -> PaperBroker:
        path = model if isinstance(model, Path) else tiny_model(model)
        made.append(PaperBroker(tmp_path, pool_name, path, packed_dir))
        return made[-1]

    yield make
    for broker in made:
        broker.close()

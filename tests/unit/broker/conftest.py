"""A broker's machine among simulated clients, text threads, workers and shared memory.

The simulated parts are strict: a worker that attaches to an object without a name, creates one that exists, or holds more jobs
than it has slots fails the test; after every event the machine's `validate` runs, and a request that ends twice fails at once.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from geist_pool.broker.events import (
    Action,
    Adopted,
    AdoptStore,
    Event,
    KillWorker,
    Log,
    Received,
    SendReply,
    SendWorker,
    StartText,
    TextReady,
    Unlink,
    WorkerLost,
    WorkerSaid,
)
from geist_pool.broker.machine import Machine, MachineConfig
from geist_pool.broker.text_types import TextDone, TextJob
from geist_pool.errors import GeistPoolError
from geist_pool.protocol import (
    Announce,
    Assign,
    CancelJob,
    CreateDone,
    CreateWork,
    Done,
    ErrorBody,
    Failed,
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
    Reply,
    Request,
    ScoreDone,
    Shutdown,
    Timings,
    Tokens,
    ToWorker,
    Usage,
)

GEOMETRY = Geometry(header_bytes=4096, n_vocab=256, recurrent_bytes=8192, kv_bytes_per_token=64, kv_block_bytes=4096)
N_CTX = 1000


def token_after(tokens: tuple[int, ...], seed: int) -> int:
    """The simulated model: the next token is a hash of everything before it."""
    digest = hashlib.blake2b(repr((tokens, seed)).encode(), digest_size=1).digest()
    return 97 + digest[0] % 26


def do_text(job: TextJob) -> TextDone:
    """The simulated tokenizer: an id is the character's code; a message is `role:content;`."""
    prompt = job.prompt
    tokens: tuple[int, ...] = ()
    messages = None
    if prompt is not None:
        if prompt.messages is not None:
            messages = (*(job.context_messages or ()), *prompt.messages)
            tokens = tuple(map(ord, "".join(f"{m.role}:{m.content};" for m in prompt.messages)))
        elif prompt.text is not None:
            tokens = tuple(map(ord, prompt.text))
        else:
            assert prompt.tokens is not None
            tokens = prompt.tokens
    labels = tuple(tuple(map(ord, label)) if isinstance(label, str) else label for label in job.labels)
    return TextDone(key=job.key, tokens=tokens, label_tokens=labels, label_joins=(None,) * len(labels), messages=messages)


@dataclass
class FakeJob:
    assign: Assign
    tokens: tuple[int, ...]  # context and suffix
    answer: list[int] = field(default_factory=list)


class FakeWorker:
    """Does what a worker does, one step at a time, with its mapping rules: `forget` waits until nothing uses the context."""

    def __init__(self, world: World, name: str, slots: int) -> None:
        self.world, self.name, self.slots = world, name, slots
        self.inbox: deque[ToWorker] = deque()
        self.jobs: dict[str, FakeJob] = {}
        self.mapped: set[str] = set()
        self.to_forget: set[str] = set()
        self.alive = True

    def say(self, message: FromWorker) -> None:
        if self.alive:
            self.world.handle(WorkerSaid(self.name, message))

    def map(self, assign_or_announce: Assign | Announce) -> tuple[int, ...]:
        """Tokens of the chain's leaf; every object that has to be there is."""
        chain = assign_or_announce.chain
        leaf = chain[-1]
        if isinstance(assign_or_announce, Announce) and leaf.image not in self.world.shm:
            raise FileNotFoundError(leaf.image)  # it went before it was read
        assert leaf.image in self.world.shm, f"{leaf.image} has no name any more"
        for ref in chain:
            if ref.kv is not None and ref.id not in self.mapped:
                assert ref.kv in self.world.shm, f"{ref.kv} has no name any more"
        assert [r.first_block for r in chain] == [0, *(r.first_block + r.n_blocks for r in chain)][:-1]
        self.mapped.update(ref.id for ref in chain)
        return self.world.shm[leaf.image][1]

    def read(self) -> bool:
        """Takes in one message; False if there is none."""
        if not self.inbox or not self.alive:
            return False
        message = self.inbox.popleft()
        if isinstance(message, Assign):
            assert len(self.jobs) < self.slots, "more jobs than slots"
            base = self.map(message) if message.chain else ()
            self.jobs[message.job] = FakeJob(message, base + message.work.tokens)
        elif isinstance(message, Announce):
            try:
                self.map(message)
                self.say(Mapped(message.chain[-1].id))
            except FileNotFoundError as error:
                self.say(Mapped(message.chain[-1].id, ErrorBody("image_damaged", str(error))))
        elif isinstance(message, Forget):
            self.to_forget.add(message.context)
            self.collect()
        elif isinstance(message, CancelJob):
            if message.job in self.jobs:
                self.end(message.job, message)
        elif isinstance(message, Ping):
            self.say(Pong(message.n))
        else:
            assert isinstance(message, Shutdown)
            self.alive = False
        return True

    def read_all(self) -> None:
        while self.read():
            pass

    def collect(self) -> None:
        in_use = {ref.id for job in self.jobs.values() for ref in job.assign.chain}
        for context in sorted(self.to_forget - in_use):
            self.to_forget.discard(context)
            self.mapped.discard(context)
            self.say(Forgotten(context))

    def step(self, key: str | None = None) -> None:
        """One token of a generation (told at once where it streams), or the end of a job."""
        key = key or next(iter(self.jobs))
        job = self.jobs[key]
        work = job.assign.work
        if isinstance(work, GenerateWork) and len(job.answer) < work.max_tokens:
            index = len(job.answer)
            token = token_after(job.tokens + tuple(job.answer), work.sampling.seed or 0)
            job.answer.append(token)
            if work.stream:
                self.say(Tokens(key, job.assign.attempt, index, (token,), bytes([token]), None, index))
        if not isinstance(work, GenerateWork) or len(job.answer) == work.max_tokens:
            self.end(key)

    def end(self, key: str, cancel: CancelJob | None = None) -> None:
        job = self.jobs.pop(key)
        attempt, work = job.assign.attempt, job.assign.work
        n_base = len(job.tokens) - len(work.tokens)
        usage = Usage(reused=n_base, prefilled=len(work.tokens), generated=len(job.answer))
        timings = Timings(prefill=1, decode=1)
        if isinstance(work, GenerateWork) and (cancel is None or cancel.finish):
            why = "length" if cancel is None else cancel.reason
            done = GenerateDone(tuple(job.answer), bytes(job.answer), why, None, None)
            self.say(Done(key, attempt, done, usage, timings))
        elif cancel is not None:
            self.say(Failed(key, attempt, ErrorBody(cancel.reason, "called off")))
        elif isinstance(work, CreateWork):
            self.world.publish(work, job.tokens)
            self.say(Done(key, attempt, CreateDone(1), usage, timings))
        else:
            rows = tuple(tuple(-0.5 - (t % 7) for t in label) for label in work.labels)
            self.say(Done(key, attempt, ScoreDone(rows), usage, timings))
        self.collect()

    def finish_all(self) -> None:
        self.read_all()
        while self.jobs:
            self.step()
            self.read_all()

    def die(self) -> None:
        self.alive = False
        del self.world.workers[self.name]
        self.world.handle(WorkerLost(self.name, "killed by the test"))


class World:
    token_after = staticmethod(token_after)
    do_text = staticmethod(do_text)

    def __init__(self, *, seed: int = 1, adopt: Adopted | None = None, **config: object) -> None:
        options: dict[str, object] = {
            "pool": "test", "version": "0", "model": "toy", "n_vocab": 256, "eog": (0,), "has_template": True, "memory": 1 << 24,
        }  # fmt: skip
        self.config = MachineConfig(**(options | config))  # type: ignore[arg-type]
        self.machine = Machine(self.config, random.Random(seed))
        self.now = 1000.0
        self.auto_text = True
        self.adopt = adopt or Adopted((), ())
        self.texts: list[TextJob] = []
        self.replies: list[SendReply] = []
        self.log: list[Log] = []
        self.killed: list[str] = []
        self.unlinked: list[str] = []
        self.workers: dict[str, FakeWorker] = {}
        self.shm: dict[str, tuple[int, tuple[int, ...]]] = {}  # name -> (bytes, tokens of the context)
        self.asked: Counter[tuple[bytes, bytes]] = Counter()
        self.ended: Counter[tuple[bytes, bytes]] = Counter()
        self.gone: set[bytes] = set()

    # ---- in

    def handle(self, event: Event) -> list[Action]:
        actions = self.machine.handle(event, self.now)
        self.machine.validate()
        for action in actions:
            self.perform(action)
        return actions

    def perform(self, action: Action) -> None:
        if isinstance(action, SendReply):
            self.replies.append(action)
            if action.reply.final:
                key = (action.route[0], action.request_id)
                self.ended[key] += 1
                assert self.ended[key] <= self.asked[key], f"request {key} ended twice"
        elif isinstance(action, SendWorker):
            if action.worker in self.workers:
                self.workers[action.worker].inbox.append(action.message)
        elif isinstance(action, StartText):
            self.texts.append(action.job)
            if self.auto_text:
                self.finish_text()
        elif isinstance(action, Unlink):
            self.unlinked += action.names
            for name in action.names:
                self.shm.pop(name, None)
        elif isinstance(action, KillWorker):
            self.killed.append(action.worker)
        elif isinstance(action, AdoptStore):
            self.handle(self.adopt)
        else:
            assert isinstance(action, Log)
            self.log.append(action)

    def ask(
        self, request: Request | GeistPoolError, rid: bytes | str = b"r", peer: bytes = b"c", *, stream_ok: bool = True
    ) -> None:
        rid = rid.encode() if isinstance(rid, str) else rid
        self.asked[peer, rid] += 1
        self.handle(Received((peer,), rid, request, stream_ok, False))

    def finish_text(self, index: int = 0) -> None:
        self.handle(TextReady(do_text(self.texts.pop(index))))

    def hello(self, name: str = "w0", slots: int = 1, **changes: object) -> FakeWorker:
        worker = self.workers[name] = FakeWorker(self, name, slots)
        fields: dict[str, object] = {
            "worker": name, "pid": 4711, "protocol": 1, "fingerprint": "ab" * 32, "numerics": 1, "image_format": 1,
            "geometry": GEOMETRY, "architecture": "llama", "n_vocab": 256, "n_ctx": N_CTX, "kv_type": "f16", "tier": "scalar",
            "threads": 1, "slots": slots,
        }  # fmt: skip
        self.handle(WorkerSaid(name, Hello(**(fields | changes))))  # type: ignore[arg-type]
        return worker

    def publish(self, work: CreateWork, tokens: tuple[int, ...]) -> None:
        ref = work.grant.ref
        assert ref.n_tokens == len(tokens)
        for name, n_bytes in ((ref.image, ref.image_bytes), (ref.kv, ref.kv_bytes)):
            if name is not None:
                assert name not in self.shm, f"{name} exists"
                self.shm[name] = (n_bytes, tokens)

    # ---- out

    def final(self, rid: bytes | str = b"r", peer: bytes = b"c") -> Reply:
        """The last final reply to this request; AssertionError if it has none."""
        rid = rid.encode() if isinstance(rid, str) else rid
        found = [r.reply for r in self.replies if (r.route[0], r.request_id) == (peer, rid) and r.reply.final]
        assert found, f"request {rid!r} has not ended"
        return found[-1]

    def is_open(self, rid: str, peer: bytes = b"c") -> bool:
        return self.asked[peer, rid.encode()] > self.ended[peer, rid.encode()]

    def result(self, rid: bytes | str = b"r", peer: bytes = b"c"):  # type: ignore[no-untyped-def]
        reply = self.final(rid, peer)
        assert reply.ok and reply.result is not None, reply
        return reply.result

    def error(self, rid: bytes | str = b"r", peer: bytes = b"c") -> ErrorBody:
        reply = self.final(rid, peer)
        assert not reply.ok and reply.error is not None, reply
        return reply.error

    def chunks(self, rid: str, peer: bytes = b"c") -> list:  # type: ignore[type-arg]
        return [
            r.reply.result for r in self.replies
            if (r.route[0], r.request_id) == (peer, rid.encode()) and not r.reply.final
        ]  # fmt: skip

    def run(self) -> None:
        """Every worker does everything it has."""
        while any(w.inbox or w.jobs for w in self.workers.values()):
            for worker in list(self.workers.values()):
                worker.finish_all()

    @property
    def stats(self):  # type: ignore[no-untyped-def]
        from geist_pool.protocol import Stats

        actions = self.machine.handle(Received((b"s",), b"s", Stats(), False, False), self.now)
        (reply,) = [a for a in actions if isinstance(a, SendReply)]
        assert reply.reply.result is not None
        return reply.reply.result


@pytest.fixture
def world_of() -> Callable[..., World]:
    """Makes worlds: World(seed=..., adopt=..., **fields of MachineConfig)."""
    return World


@pytest.fixture
def world(world_of: Callable[..., World]) -> World:
    return world_of()

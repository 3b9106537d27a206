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
from loop_kit import pool, pool_of  # noqa: F401

from geist_pool.broker.events import (
    Action,
    Adopted,
    AdoptedContext,
    AdoptStore,
    Bindings,
    Event,
    KeepBindings,
    KillWorker,
    ListSaved,
    Log,
    MakeDirectory,
    Peeked,
    PeekSaved,
    Received,
    SavedFile,
    SavedHead,
    SavedListed,
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
from geist_pool.errors import GeistPoolError, UnknownContext
from geist_pool.protocol import (
    Announce,
    Assign,
    CancelJob,
    ContextRef,
    CreateDone,
    CreateWork,
    Done,
    Envelope,
    ErrorBody,
    Failed,
    Forget,
    Forgotten,
    FromWorker,
    GenerateDone,
    GenerateWork,
    Geometry,
    Hello,
    LoadDone,
    LoadWork,
    Mapped,
    Ping,
    Pong,
    Reply,
    Request,
    SampleDone,
    SaveDone,
    SaveWork,
    ScoreDone,
    Shutdown,
    Timings,
    Tokens,
    ToWorker,
    Usage,
)
from geist_pool.store import layout

GEOMETRY = Geometry(header_bytes=4096, n_vocab=256, recurrent_bytes=8192, kv_bytes_per_token=64, kv_block_bytes=4096)
N_CTX = 1000


def token_after(tokens: tuple[int, ...], seed: int, stream: int = 0) -> int:
    """The simulated model: the next token is a hash of everything before it."""
    digest = hashlib.blake2b(repr((tokens, seed, stream)).encode(), digest_size=1).digest()
    return 97 + digest[0] % 26


def do_text(job: TextJob) -> TextDone:
    """The simulated tokenizer: an id is the character's code; a message is `role:content;`."""
    if job.answer is not None:
        assert bytes(job.answer).startswith(job.answer_data)
        return TextDone(key=job.key, tokens=job.answer[: len(job.answer_data)])
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
    answers: list[list[int]] = field(default_factory=list)  # by sample


class FakeWorker:
    """Does what a worker does, one step at a time, with its mapping rules: `forget` waits until nothing uses the context."""

    def __init__(self, world: World, name: str, slots: int) -> None:
        self.world, self.name, self.slots = world, name, slots
        self.inbox: deque[ToWorker] = deque()
        self.jobs: dict[str, FakeJob] = {}
        self.mapped: set[str] = set()
        self.to_forget: set[str] = set()
        self.alive = True
        self.tears = False  # its answers end inside a token: nothing is published, the last byte is cut off

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
            work = message.work
            suffix = () if isinstance(work, SaveWork | LoadWork) else work.tokens
            answers: list[list[int]] = []
            if isinstance(work, GenerateWork):  # the last token of what was said before is gone through again
                answers = [list(said.tokens[:-1]) for said in work.said] or [[] for _ in range(work.n)]
                assert len(answers) == work.n
            self.jobs[message.job] = FakeJob(message, base + suffix, answers)
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
        if isinstance(work, GenerateWork):
            sample = min(range(work.n), key=lambda i: (len(job.answers[i]), i))
            answer = job.answers[sample]
            if len(answer) < work.max_tokens:
                index = len(answer)
                token = token_after(job.tokens + tuple(answer), work.sampling.seed or 0, work.sampling.stream + sample)
                answer.append(token)
                if work.stream:
                    self.say(Tokens(key, job.assign.attempt, index, (token,), bytes([token]), None, index, sample))
            if min(map(len, job.answers)) < work.max_tokens:
                return
        self.end(key)

    def end(self, key: str, cancel: CancelJob | None = None) -> None:
        job = self.jobs.pop(key)
        attempt, work = job.assign.attempt, job.assign.work
        chain = job.assign.chain
        n_base = chain[-1].n_tokens if chain else 0
        usage = Usage(reused=n_base, prefilled=len(job.tokens) - n_base, generated=sum(map(len, job.answers)))
        timings = Timings(prefill=1, decode=1, attach=2 if chain else 0)
        if isinstance(work, GenerateWork) and (cancel is None or cancel.finish):
            self.say(Done(key, attempt, self.answer(job, work, "length" if cancel is None else cancel.reason), usage, timings))
        elif cancel is not None:
            self.say(Failed(key, attempt, ErrorBody(cancel.reason, "called off")))
        elif isinstance(work, CreateWork):
            self.world.publish(work.grant.ref, work.grant.envelope, job.tokens)
            self.say(Done(key, attempt, CreateDone(1), usage, timings))
        elif isinstance(work, SaveWork):
            self.world.files[work.path] = (work.envelope, job.tokens)
            self.say(Done(key, attempt, SaveDone(1000 + len(job.tokens)), usage, timings))
        elif isinstance(work, LoadWork):
            tokens = self.world.files[work.path][1]
            if len(tokens) != work.grant.ref.n_tokens:  # another one was saved under the name since it was looked at
                self.say(Failed(key, attempt, ErrorBody("image_damaged", "another file")))
                self.collect()
                return
            self.world.publish(work.grant.ref, work.grant.envelope, tokens)
            self.say(Done(key, attempt, LoadDone(1, tokens), usage, timings))
        else:
            rows = tuple(tuple(-0.5 - (t % 7) for t in label) for label in work.labels)
            self.say(Done(key, attempt, ScoreDone(rows), usage, timings))
        self.collect()

    def answer(self, job: FakeJob, work: GenerateWork, why: str) -> GenerateDone:
        torn = self.tears and why == "length" and work.grant is not None and len(job.answers[0]) > 1
        samples = [SampleDone(tuple(a), bytes(a[:-1] if torn else a), why, None, None) for a in job.answers]
        first = samples[0]
        published = None
        if work.grant is not None and not torn:
            assert work.grant.ceiling
            tokens = job.tokens + first.tokens
            cut = layout.cut_to(work.grant, len(tokens), GEOMETRY, first.data.decode())
            published, envelope = cut.ref, cut.envelope
            self.world.publish(published, envelope, tokens)
        return GenerateDone(first.tokens, first.data, why, None, None, more=tuple(samples[1:]), published=published)

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
            "pool": "test", "store": "test", "version": "0", "model": "toy", "n_vocab": 256, "eog": (0,),
            "has_template": True, "memory": 1 << 24, "saved_dir": "/saved",
        }  # fmt: skip
        self.config = MachineConfig(**(options | config))  # type: ignore[arg-type]
        self.machine = Machine(self.config, random.Random(seed))
        self.now = 1000.0
        self.auto_text = True
        self.adopt = adopt or Adopted((), ())
        self.texts: list[TextJob] = []
        self.looks: list[PeekSaved | ListSaved] = []
        self.files: dict[str, tuple[Envelope, tuple[int, ...]]] = {}
        self.file_fingerprint = "ab" * 32
        self.directories: list[str] = []
        self.bindings: Bindings | None = None
        self.replies: list[SendReply] = []
        self.log: list[Log] = []
        self.killed: list[str] = []
        self.unlinked: list[str] = []
        self.workers: dict[str, FakeWorker] = {}
        self.shm: dict[str, tuple[int, tuple[int, ...]]] = {}  # name -> (bytes, tokens of the context)
        self.sealed: dict[str, AdoptedContext] = {}  # by name of the image, as long as that may be there
        self.known: dict[str, tuple[int, ...]] = {}  # tokens of every context that ever was
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
            key = (action.route[0], action.request_id)
            assert action.reply.final or self.ended[key] < self.asked[key], f"a chunk of {key} for nobody"
            if action.reply.final:
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
        elif isinstance(action, KeepBindings):
            self.bindings = action.bindings
        elif isinstance(action, PeekSaved | ListSaved):
            self.looks.append(action)
            if self.auto_text:
                self.look()
        elif isinstance(action, MakeDirectory):
            self.directories.append(action.path)
        else:
            assert isinstance(action, Log)
            self.log.append(action)

    def scan(self) -> Adopted:
        """What a new broker finds in shared memory."""
        found = [s for name, s in self.sealed.items() if name in self.shm]
        sound = [s for s in found if all(r.kv in self.shm for r in (*s.envelope.chain, s.ref) if r.kv is not None)]
        assert len(sound) == len(found), "a sealed context has lost blocks"
        used = {n for s in sound for n in (s.ref.image, s.ref.kv, *(r.kv for r in s.envelope.chain))}
        return Adopted(
            tuple(sorted(sound, key=lambda s: len(s.envelope.chain))),
            tuple(n for n in sorted(self.shm) if n not in used),
            self.bindings,
        )

    def ask(
        self, request: Request | GeistPoolError, rid: bytes | str = b"r", peer: bytes = b"c", *, stream_ok: bool = True
    ) -> None:
        rid = rid.encode() if isinstance(rid, str) else rid
        digest = b"" if isinstance(request, GeistPoolError) else hashlib.blake2b(repr(request).encode(), digest_size=8).digest()
        in_flight = self.machine.books.tickets.get((peer, rid))
        if in_flight is None or in_flight.digest != digest or in_flight.left is not None:  # else it takes the place of the first
            self.asked[peer, rid] += 1
        self.handle(Received((peer,), rid, request, stream_ok, False, digest))

    def look(self, index: int = 0) -> None:
        """A look at files comes to its end."""
        action = self.looks.pop(index)
        if isinstance(action, PeekSaved):
            found = self.files.get(action.path)
            self.handle(Peeked(action.job, UnknownContext("no such file") if found is None else self.head(*found)))
            return
        stems = {p: p.removeprefix(action.directory + "/") for p in self.files if p.startswith(action.directory + "/")}
        files = tuple(SavedFile(stem.removesuffix(".geist"), self.head(*self.files[p])) for p, stem in sorted(stems.items()))
        self.handle(SavedListed(action.job, files))

    def head(self, envelope: Envelope, tokens: tuple[int, ...]) -> SavedHead:
        return SavedHead(envelope, len(tokens), self.file_fingerprint, 1000 + len(tokens), self.now)

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

    def publish(self, ref: ContextRef, envelope: Envelope, tokens: tuple[int, ...]) -> None:
        assert ref.n_tokens == len(tokens)
        assert ref.image_bytes == layout.image_object_bytes(GEOMETRY, len(tokens), envelope)
        assert ref.kv_bytes == layout.kv_object_bytes(GEOMETRY, ref.n_blocks)
        self.sealed[ref.image] = AdoptedContext(envelope, ref, tokens)
        self.known[ref.id] = tokens
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

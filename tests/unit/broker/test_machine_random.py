"""Property: over a hundred thousand random events every collection of the machine stays consistent after each event, every
request ends exactly once, every answer is the one that its own prompt has, every context holds the tokens that it says, and in
the end shared memory and the books agree to the byte. Events are requests of every kind from several clients and spaces (samples,
published answers, files, the same request again), text and files in any order, workers that answer, die, are replaced and unmap
late, cancels, deadlines, clients that are lost and come back, full memory, spaces at their limits, and brokers that die and adopt
what is there.
Tolerance: none. Reason: what goes wrong in a broker goes wrong in an order that nobody thought of.

GEIST_POOL_SIMULATE=N plays N events instead; the seed of a sequence that failed is printed, and GEIST_POOL_SIMULATE_SEED=SEED
plays that one.
"""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from geist_pool.broker.content import unpack_ids
from geist_pool.broker.events import ClientGone, Stop, Tick
from geist_pool.config import SpaceQuota
from geist_pool.protocol import (
    Cancel,
    ContextCreate,
    ContextDrop,
    ContextGet,
    ContextList,
    ContextLoad,
    ContextResult,
    ContextSave,
    ContextSaved,
    Generate,
    GenerateResult,
    Info,
    Message,
    Publish,
    Sampling,
    Score,
    Stats,
    Story,
    Tokenize,
)

EVENTS = int(os.environ.get("GEIST_POOL_SIMULATE", "100000"))
LENGTH = 800  # events of one sequence
PEERS = (b"a", b"b", b"c", b"d")
SPACES = ("default", "other")
NAMES = ("n0", "n1", "n2")
TEXTS = (*("abcdefgh"[:n] * r for n in (1, 3, 8) for r in (1, 9, 30)), "abx" * 30, "b")
WORLDS = (
    {},
    {"memory": 200_000},
    {"memory": 100_000, "reserve_timeout_s": 2.0},
    {"memory": 400_000, "spaces": {"other": SpaceQuota(memory=90_000, queue=4, contexts=3)}},
    {"remember_replies": 5, "max_attempts": 2, "queue": 10},
)


class Player:
    """Draws the events, and remembers what each answer must be."""

    def __init__(self, world_of, rng: random.Random, options: dict) -> None:
        self.world_of = world_of
        self.rng = rng
        self.options = {"queue": 40, "max_attempts": 3, **options}
        self.world = world_of(seed=rng.getrandbits(32), **self.options)
        self.world.auto_text = False
        self.n_requests = 0
        self.n_workers = 0
        self.checked = 0
        self.asked: dict[tuple[bytes, bytes], tuple[object, str | None]] = {}  # the request, and the id of the context it names
        self.again: set[tuple[bytes, bytes]] = set()  # asked more than once
        self.early: set[tuple[bytes, bytes]] = set()  # asked before it was known what contexts there are
        self.seen = 0
        kinds = {
            self.request: 20, self.repeat: 3, self.back: 5, self.text: 25, self.look: 8, self.worker_reads: 80,
            self.worker_steps: 70, self.cancel: 2, self.gone: 0.8, self.time: 4, self.birth: 4, self.death: 0.7,
            self.restart: 0.15,
        }  # fmt: skip
        self.moves, self.weights = list(kinds), list(kinds.values())

    def play(self) -> None:
        self.rng.choices(self.moves, self.weights)[0]()
        self.check_new_answers()
        if self.rng.random() < 0.02:
            self.world.now += self.rng.random() * 5

    # ---- clients

    def request(self) -> None:
        rng, world = self.rng, self.world
        peer, space = rng.choice(PEERS), rng.choice(SPACES)
        self.n_requests += 1
        rid = f"r{self.n_requests}".encode()
        sealed = world.machine.books.directory.sealed(space)
        reference = rng.choice([None, None, *NAMES, *[e.id for e in sealed[-3:]]])
        entry = None if reference is None else world.machine.books.directory.find(space, reference)
        request = self.draw(space, reference)
        self.asked[peer, rid] = (request, None if entry is None else entry.id)
        if not world.machine.books.adopted:
            self.early.add((peer, rid))
        world.ask(request, rid, peer)

    def draw(self, space: str, reference: str | None):
        rng = self.rng
        text = rng.choice([*TEXTS, None]) if reference is not None else rng.choice(TEXTS)
        prompt = {"text": text}
        if rng.random() < 0.1:
            prompt = {"messages": (Message("user", rng.choice(TEXTS)),)}
        common = {"space": space, "deadline_ms": rng.choice([None, None, None, 500, 3000])}
        keep = {"name": rng.choice([None, *NAMES]), "pin": rng.random() < 0.02, "ttl_s": rng.choice([None, None, 20])}
        kind = rng.random()
        if kind < 0.25:
            return ContextCreate(on=reference, **prompt, **keep, **common)
        if kind < 0.6:
            publish, n = (Publish(**keep), 1) if rng.random() < 0.4 else (None, rng.choice([1, 1, 3]))
            return Generate(
                context=reference, max_tokens=rng.randrange(1, 6), stream=rng.random() < 0.5, n=n, publish=publish,
                sampling=Sampling(seed=rng.randrange(1000), stream=rng.randrange(3)), **prompt, **common,
            )  # fmt: skip
        if kind < 0.7:
            return Score(context=reference, labels=("yes", "no", (1, 2)), **prompt, **common)
        if kind < 0.76:
            return ContextSave(context=reference or "n0", saved=rng.choice([None, "s0", "../s1"]), **common)
        if kind < 0.82:
            return ContextLoad(saved=rng.choice(["s0", "../s1", *NAMES]), **keep, **common)
        return rng.choice(
            [
                Info(), Stats(), Tokenize(text="x", space=space), ContextList(space=space), Story(id=f"r{self.n_requests}"),
                ContextGet(context=rng.choice(NAMES), space=space), ContextDrop(context=reference or "n0", space=space),
                ContextSaved(**common),
            ]
        )  # fmt: skip

    def repeat(self) -> None:
        """An earlier request again, by the same client or another one."""
        if self.asked:
            self.ask_again(self.rng.choice(list(self.asked)[-20:]))

    def ask_again(self, key: tuple[bytes, bytes]) -> None:
        (peer, rid), asked = key, self.asked[key]
        peer = self.rng.choice([peer, *PEERS])
        self.again.add((peer, rid))
        self.asked[peer, rid] = asked
        self.world.ask(asked[0], rid, peer)

    def back(self) -> None:
        """A client that is gone comes back while its work still goes on: for it, or with its id for something else."""
        left = [key for key, t in self.world.machine.books.tickets.items() if t.left is not None]
        if left:
            peer, rid = self.rng.choice(left)
            if self.rng.random() < 0.8:
                self.ask_again((peer, rid))
            else:
                self.world.ask(Info(), rid, peer)

    def cancel(self) -> None:
        peer = self.rng.choice(PEERS)
        self.n_requests += 1
        target = f"r{self.rng.randrange(max(1, self.n_requests - 30), self.n_requests + 1)}"
        self.world.ask(Cancel(id=target), f"r{self.n_requests}", peer)

    def gone(self) -> None:
        peer, why = self.rng.choice(PEERS), self.rng.choice(["disconnected", "slow"])
        of_peer = [key for key in self.world.asked if key[0] == peer]
        if why == "disconnected":
            for key in of_peer:
                self.world.asked[key] = self.world.ended[key]  # nobody waits for these any more
        self.world.handle(ClientGone(peer, why, 1))
        assert all(self.world.asked[key] == self.world.ended[key] for key in of_peer), "one that only reads slowly waits on"

    # ---- everything else

    def text(self) -> None:
        if self.world.texts:
            self.world.finish_text(self.rng.randrange(len(self.world.texts)))

    def look(self) -> None:
        if self.world.looks:
            self.world.look(self.rng.randrange(len(self.world.looks)))

    def some_worker(self):
        return self.rng.choice(list(self.world.workers.values())) if self.world.workers else None

    def worker_reads(self) -> None:
        worker = self.some_worker()
        if worker is not None:
            worker.read()

    def worker_steps(self) -> None:
        worker = self.some_worker()
        if worker is not None and worker.jobs:
            worker.tears = self.rng.random() < 0.3
            worker.step(self.rng.choice(list(worker.jobs)))

    def time(self) -> None:
        self.world.now += self.rng.random()
        self.world.handle(Tick())

    def birth(self) -> None:
        if len(self.world.workers) < 3:
            self.n_workers += 1
            self.world.hello(f"w{self.n_workers}", slots=self.rng.choice([1, 1, 2]))

    def death(self) -> None:
        worker = self.some_worker()
        if worker is not None:
            worker.die()

    def restart(self) -> None:
        """The broker dies, and with it all workers and what was in flight; a new one finds shared memory and files."""
        old = self.world
        certain = self.rng.random() < 0.5
        if certain:  # what was bound has been written down
            old.now += 0.3
            old.handle(Tick())
        called = bindings_in(old)
        self.world = self.world_of(seed=self.rng.getrandbits(32), adopt=old.scan(), **self.options)
        for name in ("shm", "sealed", "known", "files", "bindings", "now"):
            setattr(self.world, name, getattr(old, name))
        self.world.auto_text = False
        self.asked.clear()
        self.again.clear()
        self.early.clear()
        self.seen = 0
        if certain and called is not None:
            self.birth()
            now = bindings_in(self.world)
            assert now is not None and now == {key: called[key] for key in now}, "a context is not called what it was called"
            kept = {key for key in called if called[key][3] is None or called[key][3] > self.world.now}
            assert kept == set(now)

    # ---- what must be

    def check_new_answers(self) -> None:
        world = self.world
        for sent in world.replies[self.seen :]:
            key = (sent.route[0], sent.request_id)
            if isinstance(sent.reply.result, GenerateResult):
                self.check_generated(key, sent.reply.result)
            elif isinstance(sent.reply.result, ContextResult) and key in self.asked:
                request, _ = self.asked[key]
                if isinstance(request, ContextCreate):
                    tokens = world.known[sent.reply.result.context.id]
                    assert tokens[len(tokens) - len(self.suffix(request)) :] == self.suffix(request)
        self.seen = len(world.replies)

    def suffix(self, request) -> tuple[int, ...]:
        if request.messages is not None:
            return tuple(map(ord, "".join(f"{m.role}:{m.content};" for m in request.messages)))
        return tuple(map(ord, request.text or ""))

    def check_generated(self, key: tuple[bytes, bytes], result: GenerateResult) -> None:
        """Each answer is what the simulated model says of its own prompt, whoever computed it, on whatever context."""
        world = self.world
        request, context = self.asked[key]
        base = () if result.context is None else world.known[result.context]
        whole = self.suffix(request) if request.context is None else base + self.suffix(request)
        assert whole[: len(base)] == base
        if request.context is not None and key not in self.again | self.early:
            assert result.context == context, "another context than the one named when it was asked"
        samples = result.samples or (result,)
        assert len(samples) == request.n and result.seed == request.sampling.seed
        chunks: dict[int, list[int]] = {i: [] for i in range(request.n)}
        for chunk in world.chunks(key[1].decode(), key[0]):
            assert chunk.index <= len(chunks[chunk.sample]), "a gap in a stream"
            chunks[chunk.sample][chunk.index :] = chunk.tokens
        for i, sample in enumerate(samples):
            answer: list[int] = []
            for _ in sample.tokens:
                answer.append(world.token_after(whole + tuple(answer), result.seed, request.sampling.stream + i))
            assert sample.tokens == tuple(answer), f"{key} got another prompt's answer"
            assert bytes(answer).startswith(sample.raw) and len(sample.raw) >= len(answer) - 1
            if request.stream and key not in self.again:
                assert tuple(chunks[i]) == sample.tokens
        if result.published is not None:
            assert world.known[result.published.id] == whole + tuple(result.raw)
        assert (request.publish is None) == (result.published is None and result.publish_error is None)
        self.checked += 1

    def settle(self) -> None:
        """No more requests; everything that is under way comes to its end."""
        world = self.world
        if not world.workers:
            self.birth()
        while world.texts or world.looks or any(w.inbox or w.jobs for w in world.workers.values()):
            self.text()
            self.look()
            world.run()
        self.check_new_answers()
        books = world.machine.books
        assert not books.jobs and not books.tickets and not books.repeats and not books.queued
        assert world.asked == world.ended, "a request has not ended, or more than once"
        directory = books.directory
        assert sum(n for n, _ in world.shm.values()) == directory.used and directory.unmapping_bytes() == 0
        for entry in directory.sealed():
            assert unpack_ids(entry.tokens) == world.known[entry.id]
        world.handle(Stop())
        assert not world.shm

    def stop_amid(self) -> None:
        """Whatever is under way, everyone has an answer then."""
        world = self.world
        world.handle(Stop())
        self.check_new_answers()
        assert world.asked == world.ended and not world.machine.books.jobs
        assert not world.machine.books.directory.sealed()
        assert not world.shm or not world.machine.books.adopted  # what was never looked through the loop empties


def bindings_in(world) -> dict | None:
    """By id: space, names, pin and end of each context; None while they are not known yet."""
    books = world.machine.books
    if not books.adopted:
        return None
    return {e.id: (e.space, tuple(e.names), e.pinned, e.expires) for e in books.directory.sealed()}


def simulate(world_of, seed: int, n_events: int, options: dict) -> int:
    rng = random.Random(seed)
    player = Player(world_of, rng, options)
    for _ in range(n_events):
        player.play()
    if rng.random() < 0.3:
        player.stop_amid()
    else:
        player.settle()
    return player.checked


@pytest.mark.parametrize("options", WORLDS, ids=lambda o: "-".join(o) or "plain")
def test_random_events(world_of, options):
    given = os.environ.get("GEIST_POOL_SIMULATE_SEED")
    first = int(given) if given else random.SystemRandom().getrandbits(32)
    n = 1 if given else max(1, EVENTS // len(WORLDS) // LENGTH)
    checked = 0
    for seed in range(first, first + n):
        print(f"GEIST_POOL_SIMULATE_SEED={seed}")
        checked += simulate(world_of, seed, LENGTH, options)
    assert given or checked > 5 * n  # one seed alone may end early


def test_the_simulation_covers_what_it_claims(world_of):
    """The events that matter do happen: with a fixed seed, one of each at least."""
    rng = random.Random(3)
    player = Player(world_of, rng, {"memory": 300_000})
    happened: set[str] = set()
    away: set[tuple[bytes, bytes]] = set()
    for _ in range(6000):
        player.play()
        world = player.world
        absent = {key for key, t in world.machine.books.tickets.items() if t.left is not None}
        if absent - away:
            happened.add("left")
        if (away - absent) & world.machine.books.tickets.keys():
            happened.add("came back")
        away = absent
        happened |= {"goes on" for w in world.workers.values() for j in w.jobs.values() if getattr(j.assign.work, "said", ())}
        for job in world.machine.books.jobs.values():
            happened.add(job.state)
            if job.answer is not None:
                happened.add("from text")
            if job.attempt > 1:
                happened.add("again")
            if len({t.peer for t in job.tickets}) > 1 and isinstance(job.request, Generate):
                happened.add("joined")
        stats = msgspec.to_builtins(world.stats)
        happened |= {k for k in ("evictions", "replies_replayed", "store_orphaned_bytes", "store_unmapping_bytes") if stats[k]}
        happened |= {"found " + type(r.reply.result).__name__ for r in world.replies[-3:]}
    player.settle()
    assert happened >= {
        *("early", "text", "file", "held", "reserving", "waiting", "assigned", "cancelling"), "from text", "again", "joined",
        *("evictions", "replies_replayed", "store_orphaned_bytes", "store_unmapping_bytes"), "found SavedResult",
        "found GenerateResult", "left", "came back", "goes on",
    }  # fmt: skip

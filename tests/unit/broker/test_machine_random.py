"""Property: over thousands of random events every collection of the machine stays consistent after each event, every request
ends exactly once, every answer is the one that its own prompt has, and in the end shared memory and the books agree to the byte.
Events are requests of every kind from several clients and spaces, text in any order, workers that answer, die, are replaced and
unmap late, cancels, deadlines, lost clients, full memory. Tolerance: none. Reason: what goes wrong in a broker goes wrong in an
order that nobody thought of.
"""

from __future__ import annotations

import random

import pytest

from geist_pool.broker.content import unpack_ids
from geist_pool.broker.events import ClientGone, Stop, Tick
from geist_pool.protocol import (
    Cancel,
    ContextCreate,
    ContextDrop,
    ContextGet,
    ContextList,
    Generate,
    GenerateResult,
    Info,
    Sampling,
    Score,
    Stats,
    Tokenize,
)

EVENTS = 10_000
PEERS = (b"a", b"b", b"c", b"d")
SPACES = ("default", "other")
NAMES = ("n0", "n1", "n2")
TEXTS = (*("abcdefgh"[:n] * r for n in (1, 3, 8) for r in (1, 9, 30)), "abx" * 30, "b")


class Player:
    """Draws the events, and remembers what each answer must be."""

    def __init__(self, world, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.world.auto_text = False
        self.n_requests = 0
        self.n_workers = 0
        self.checked = 0
        self.prompts: dict[tuple[bytes, bytes], tuple[str | None, tuple[int, ...], int]] = {}
        self.seen = 0

    def play(self) -> None:
        world, rng = self.world, self.rng
        kinds = {
            self.request: 20, self.text: 25, self.worker_reads: 80, self.worker_steps: 60, self.cancel: 2, self.gone: 0.5,
            self.time: 4, self.birth: 4, self.death: 0.7,
        }  # fmt: skip
        move = rng.choices(list(kinds), list(kinds.values()))[0]
        move()
        self.check_new_answers()
        if rng.random() < 0.02:
            world.now += rng.random() * 5

    def request(self) -> None:
        rng, world = self.rng, self.world
        peer, space = rng.choice(PEERS), rng.choice(SPACES)
        self.n_requests += 1
        rid = f"r{self.n_requests}".encode()
        sealed = world.machine.books.directory.sealed(space)
        reference = rng.choice([None, None, *NAMES, *[e.id for e in sealed[-3:]]])
        entry = None if reference is None else world.machine.books.directory.find(space, reference)
        text = rng.choice([*TEXTS, None]) if reference is not None else rng.choice(TEXTS)
        deadline = rng.choice([None, None, None, 500, 3000])
        common = {"space": space, "deadline_ms": deadline}
        kind = rng.random()
        if kind < 0.3:
            request = ContextCreate(
                on=reference, text=text, name=rng.choice([None, *NAMES]), pin=rng.random() < 0.02,
                ttl_s=rng.choice([None, None, 20]), **common,
            )  # fmt: skip
        elif kind < 0.65:
            seed = rng.randrange(1000)
            request = Generate(
                context=reference, text=text, max_tokens=rng.randrange(1, 6), stream=rng.random() < 0.5,
                sampling=Sampling(seed=seed), **common,
            )  # fmt: skip
            if reference is None or entry is not None:
                whole = (() if entry is None else unpack_ids(entry.tokens)) + tuple(map(ord, text or ""))
                self.prompts[peer, rid] = (None if entry is None else entry.id, whole, seed)
        elif kind < 0.8:
            request = Score(context=reference, text=text, labels=("yes", "no", (1, 2)), **common)
        else:
            request = rng.choice(
                [
                    Info(), Stats(), Tokenize(text="x", space=space), ContextList(space=space),
                    ContextGet(context=rng.choice(NAMES), space=space), ContextDrop(context=reference or "n0", space=space),
                ]
            )  # fmt: skip
        world.ask(request, rid, peer)

    def text(self) -> None:
        if self.world.texts:
            self.world.finish_text(self.rng.randrange(len(self.world.texts)))

    def some_worker(self):
        return self.rng.choice(list(self.world.workers.values())) if self.world.workers else None

    def worker_reads(self) -> None:
        worker = self.some_worker()
        if worker is not None:
            worker.read()

    def worker_steps(self) -> None:
        worker = self.some_worker()
        if worker is not None and worker.jobs:
            worker.step(self.rng.choice(list(worker.jobs)))

    def cancel(self) -> None:
        peer = self.rng.choice(PEERS)
        self.n_requests += 1
        target = f"r{self.rng.randrange(max(1, self.n_requests - 30), self.n_requests + 1)}"
        self.world.ask(Cancel(id=target), f"r{self.n_requests}", peer)

    def gone(self) -> None:
        peer = self.rng.choice(PEERS)
        for key in self.world.asked:
            if key[0] == peer:
                self.world.asked[key] = self.world.ended[key]  # nobody waits for these any more
        self.world.handle(ClientGone(peer, self.rng.choice(["disconnected", "slow"]), 1))

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

    def check_new_answers(self) -> None:
        """Each generation is what the simulated model says of its own prompt, whoever computed it, on whatever context."""
        world = self.world
        for sent in world.replies[self.seen :]:
            key = (sent.route[0], sent.request_id)
            if not isinstance(sent.reply.result, GenerateResult):
                continue
            context, whole, seed = self.prompts[key]
            result = sent.reply.result
            answer: list[int] = []
            for _ in result.tokens:
                answer.append(self.model(whole + tuple(answer), seed))
            assert result.tokens == tuple(answer), f"{key} got another prompt's answer"
            assert context is None or result.context == context
            assert result.usage.reused + result.usage.prefilled == len(whole)
            chunks = world.chunks(key[1].decode(), key[0])
            assert not chunks or tuple(t for c in chunks for t in c.tokens) == result.tokens
            self.checked += 1
        self.seen = len(world.replies)

    def model(self, tokens: tuple[int, ...], seed: int) -> int:
        return self.world.token_after(tokens, seed)

    def settle(self) -> None:
        """No more requests; everything that is under way comes to its end."""
        world = self.world
        while world.texts:
            self.text()
        if not world.workers:
            self.birth()
        world.run()
        self.check_new_answers()


@pytest.mark.parametrize("memory", [1 << 24, 200_000])
def test_random_events(world_of, memory):
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    world = world_of(memory=memory, queue=40, max_attempts=3, seed=seed)
    player = Player(world, rng)
    for _ in range(EVENTS):
        player.play()
    player.settle()
    books = world.machine.books
    assert not books.jobs and not books.tickets
    assert world.asked == world.ended, "a request has not ended, or more than once"
    assert player.checked > 100
    directory = books.directory
    assert sum(n for n, _ in world.shm.values()) == directory.used and directory.unmapping_bytes() == 0
    world.handle(Stop())
    assert not world.shm
    for worker in list(world.workers.values()):
        worker.read_all()

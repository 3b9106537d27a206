"""A worker over thousands of contexts.

Property: resident memory, descriptors and mappings of a worker and the bytes in shared memory do not grow with the number of
contexts made, mapped, used, forgotten, saved and loaded (FINDINGS row 17). Tolerance: resident memory within 1 % of what it was
after the first thousand contexts or requests, or in a short run within `SLACK` bytes, since an allocator's page more or less is
no growth; all counts exactly. Reason: a pool runs for weeks. GEIST_POOL_TEST_PUBLISHES and
GEIST_POOL_TEST_REQUESTS set how many are made; what leaks once each shows at the defaults as well.
"""

from __future__ import annotations

import os
import resource
from collections import deque
from pathlib import Path

import pytest
from worker_kit import drop, generate, ids, mapped_names

from geist_pool import protocol as p
from geist_pool.store import shm

PUBLISHES = int(os.environ.get("GEIST_POOL_TEST_PUBLISHES", "1500"))
REQUESTS = int(os.environ.get("GEIST_POOL_TEST_REQUESTS", "3000"))
WARM = 1000  # as long as caches and the allocator may fill
KEPT = 8  # contexts at a time: the byte limit
SLACK = 640 << 10  # below one kilobyte lost with each of the contexts or requests of a short run


def most(before: int, n: int) -> int:
    """What resident memory may have become after n contexts or requests."""
    return int(before * 1.01) if n >= 10_000 else before + SLACK


def resident(pid: int) -> int:
    """Bytes of private memory: contexts that are mapped count in shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.timeout(900)
def test_memory_stays_flat_over_many_contexts(paper_broker, pool_name: str, tmp_path: Path) -> None:
    broker = paper_broker()
    worker = broker.start(slots=2)
    pid = worker.process.pid
    live: deque[p.Chain] = deque()
    sizes: list[int] = []

    def forget(chain: p.Chain) -> None:
        drop(chain)
        for ref in chain:
            assert broker.answer(worker, p.Forget(ref.id)) == p.Forgotten(ref.id)

    def cycle(n: int) -> None:
        """Of lengths from 65 to 128, now alone, now on another one, now from an answer, now by way of a file."""
        chain = broker.create(worker, ids(65 + n % 64, seed=n % 97))
        assert broker.answer(worker, p.Announce(chain)) == p.Mapped(chain[-1].id)
        if n % 3 == 0:
            chain = broker.create(worker, ids(30, seed=n % 89), chain)
            broker.run(worker, p.ScoreWork((3,), (ids(2), ids(3))), chain)
        if n % 3 == 1:
            grant = broker.grant(worker, chain[-1].n_tokens + 5, chain, ceiling=True)
            done = broker.run(worker, generate((4,), 3, grant=grant, stop=(b"zz",)), chain)
            chain = (*chain, done.result.published)
        if n % 50 == 2:
            path = tmp_path / "a"
            broker.run(worker, p.SaveWork(str(path), broker.grant(worker, chain[-1].n_tokens).envelope), chain)
            grant = broker.grant(worker, chain[-1].n_tokens)
            broker.run(worker, p.LoadWork(str(path), grant))
            live.append((grant.ref,))
        broker.run(worker, generate((3,), 2, n=1 + n % 2), chain)
        live.append(chain)
        while len(live) > KEPT:
            forget(live.popleft())
        sizes.append(shm.total_bytes(pool_name))
        broker.heard.clear()

    at_first = descriptors(pid)
    for n in range(WARM):
        cycle(n)
    before = (resident(pid), max(sizes))
    for n in range(WARM, PUBLISHES):
        cycle(n)
    assert resident(pid) <= most(before[0], PUBLISHES)
    assert max(sizes) <= before[1] * 1.01
    for chain in live:
        forget(chain)
    assert mapped_names(pid) == []
    assert descriptors(pid) == at_first
    assert shm.list_objects(pool_name) == []


@pytest.mark.timeout(900)
def test_memory_stays_flat_over_many_requests(paper_broker) -> None:
    """Of all kinds that make no context, some of them cancelled and some refused."""
    broker = paper_broker()
    worker = broker.start(slots=2)
    pid = worker.process.pid
    chain = broker.create(worker, ids(130))
    at_first = descriptors(pid)
    hot = p.Sampling(temperature=1, seed=3, top_k=20)
    before = 0

    for n in range(REQUESTS):
        work: p.Work = generate(ids(n % 5, seed=n % 97), 2, stop=(b"a",), stream=bool(n % 2), sampling=hot, n=1 + n % 3)
        if n % 4 == 1:
            work = p.ScoreWork(ids(2), (ids(1), ids(2)))
        elif n % 40 == 2:
            work = generate((600,))
        job = broker.assign(worker, work, chain)
        if n % 10 == 0:
            broker.send(worker, p.CancelJob(job, "cancelled"))
        broker.last_word(job)
        broker.heard.clear()
        if n == WARM:
            before = resident(pid)
    assert resident(pid) <= most(before, REQUESTS)
    assert descriptors(pid) <= at_first + 2, "more than the context's image and blocks"
    drop(chain)


def test_more_contexts_than_descriptors_are_an_error_and_no_end(paper_broker) -> None:
    """Python keeps a descriptor open for each mapping."""
    broker = paper_broker()
    worker = broker.start()
    pid = worker.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert soft == hard, "a worker takes what it can get"
    chain = broker.create(worker, ids(130))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid) + 1, hard))
    for _ in range(2):
        error = broker.answer(worker, p.Announce(chain)).error
        assert (error.code, "Too many open files" in error.message) == ("engine", True)
    assert mapped_names(pid) == []
    assert broker.fail(worker, generate((3,)), chain).code == "engine"
    assert broker.fail(worker, p.CreateWork(ids(130), broker.grant(worker, 130))).code == "engine"
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert broker.answer(worker, p.Announce(chain)) == p.Mapped(chain[-1].id)
    drop(chain)


def test_a_pong_counts(paper_broker) -> None:
    """Passes and tokens exactly; memory and mappings as the kernel has them."""
    broker = paper_broker()
    worker = broker.start(prefill_chunk=32)
    first = broker.answer(worker, p.Ping(1))
    assert (first.n, first.passes, first.tokens_prefilled, first.tokens_generated, first.contexts_mapped) == (1, 0, 0, 0, 0)
    assert first.rss_bytes > first.private_bytes > 1 << 20
    chain = broker.create(worker, ids(130))  # 5 passes
    broker.answer(worker, p.Announce(chain))
    broker.run(worker, generate((3,), 4, n=3), chain)  # 1 + 3 * 3: the last token of an answer is not taken in
    broker.run(worker, p.ScoreWork((), (ids(2), ids(3))), chain)  # 2
    second = broker.answer(worker, p.Ping(2))
    assert (second.n, second.passes, second.tokens_prefilled, second.tokens_generated) == (2, 17, 131, 17)
    assert second.contexts_mapped == 1
    drop(chain)

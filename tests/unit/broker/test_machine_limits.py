"""Property: limits of a space bind that space and no other; a deadline or a cancel ends a request in every state with the most
that can be said; stats add up; a story tells what happened to an id, to its own space only. Tolerance: none. Reason: what an
operator sees must be what happened, and one game must not starve, or see, another.
"""

from __future__ import annotations

import pytest

from geist_pool.broker.events import Adopted, AdoptedContext, Dropped, Tick, WorkerSaid
from geist_pool.config import SpaceQuota
from geist_pool.protocol import (
    Cancel,
    ContextCreate,
    ContextDrop,
    ContextGet,
    ContextList,
    Forgotten,
    Generate,
    Ping,
    Pong,
    Sampling,
    Score,
    Stats,
    Story,
)

# ---- quotas


def test_a_space_with_a_full_queue_is_busy_and_others_are_not(world_of):
    world = world_of(spaces={"small": SpaceQuota(queue=2)})
    for i in range(3):
        world.ask(Generate(text="a", space="small"), f"s{i}")
    world.ask(Generate(text="a"), "other")
    error = world.error("s2")
    assert error.code == "busy" and error.retry_after > 0
    assert error.data == {"queued": 2, "limit": 2, "space": "small"} and world.is_open("other") and world.is_open("s1")
    assert world.stats.spaces["small"].queue == 2
    worker = world.hello()
    worker.read_all()  # one of them is on a worker now
    world.ask(Generate(text="a", max_tokens=1, space="small"), "s3")
    assert world.is_open("s3")


def test_a_space_with_a_memory_limit(world_of):
    world = world_of(spaces={"small": SpaceQuota(memory=60_000)})
    world.hello()
    world.ask(ContextCreate(text="theirs", name="theirs"), "theirs")
    for i in range(4):
        world.ask(ContextCreate(text=f"{i}" * 10, name=f"n{i}", space="small"), f"c{i}")
        world.run()
    world.ask(ContextList(space="small"), "l")
    assert {c.name for c in world.result("l").contexts} == {"n2", "n3"}
    assert world.stats.spaces["small"].bytes <= 60_000 and world.stats.spaces["default"].contexts == 1
    world.ask(ContextCreate(text="x" * 900, space="small"), "big")
    assert world.error("big").code == "store_full" and world.error("big").data["space"] == "small"
    world.ask(ContextCreate(text="x" * 900), "elsewhere")
    world.run()
    assert world.result("elsewhere").created


def test_a_space_with_a_limit_of_contexts(world_of):
    world = world_of(spaces={"small": SpaceQuota(contexts=1)})
    world.hello()
    for i in range(2):
        world.ask(ContextCreate(text=f"{i}", name=f"n{i}", pin=i == 1, space="small"), f"c{i}")
        world.run()
    assert world.stats.spaces["small"].contexts == 1
    world.ask(ContextCreate(text="2", space="small"), "no")
    assert world.error("no").code == "store_full" and world.error("no").data == {"contexts": 1, "limit": 1, "space": "small"}


# ---- ttl and pin of what exists


def test_asking_again_for_a_context_updates_pin_and_ttl(world):
    world.hello()
    world.ask(ContextCreate(text="abc", name="n", ttl_s=10), "1")
    world.run()
    world.now += 5
    world.ask(ContextCreate(text="abc", ttl_s=10, pin=True), "2")
    again = world.result("2").context
    assert again.pinned and again.expires == world.now + 10
    world.now += 9
    world.handle(Tick())
    world.ask(ContextGet(context="n"), "there")
    assert world.final("there").ok
    world.now += 1
    world.handle(Tick())
    world.ask(ContextGet(context="n"), "gone")
    assert world.error("gone").code == "unknown_context"
    assert world.stats.evictions_by_cause == {"room": 0, "ttl": 1, "dropped": 0, "damaged": 0} and world.stats.evictions == 0


# ---- the end of a request, in every state


@pytest.mark.parametrize("state", ["early", "text", "file", "held", "waiting", "reserving", "assigned"])
def test_deadline_in_every_state(world_of, state):
    from geist_pool.protocol import ContextLoad

    world = world_of(memory=60_000)
    if state != "early":
        world.hello()
    if state == "reserving":
        for text in ("1", "2"):
            world.ask(ContextCreate(text=text), text)
            world.run()
    elif state == "waiting":
        world.ask(Generate(text="busy", max_tokens=2), "busy")
    elif state == "held":
        world.auto_text = False
        world.ask(Generate(text="in front", max_tokens=2), "front")
    world.auto_text = state not in ("text", "held", "file")
    request = ContextLoad(saved="n", deadline_ms=1000) if state == "file" else ContextCreate(text="abc", deadline_ms=1000)
    world.ask(request, "r")
    if state == "held":
        world.finish_text(1)
    (job,) = [j for j in world.machine.books.jobs.values() if j.tickets[0].request_id == b"r"]
    assert job.state == state and world.machine.wake_at() == world.now + 1
    world.now += 1
    world.handle(Tick())
    for worker in world.workers.values():
        worker.read_all()
    assert world.error("r").code == "deadline"
    world.auto_text = True
    while world.texts:
        world.finish_text()
    if state == "early":
        world.hello()
    world.run()
    assert world.stats.store_bytes_by_kind["reserved"] == 0 and world.stats.requests_active == 0


@pytest.mark.parametrize("request_", [Score(text="a", labels=("b", "c")), Generate(text="a", max_tokens=5)])
@pytest.mark.parametrize("context", [None, "n"])
def test_cancel_on_a_worker(world, request_, context):
    """During attach, prefill, decode and score the worker is told, and its word ends the request."""
    import msgspec

    worker = world.hello()
    world.ask(ContextCreate(text="abc", name="n"), "c")
    world.run()
    world.ask(msgspec.structs.replace(request_, context=context), "r")
    worker.read_all()
    world.ask(Cancel(id="r"), "x")
    assert world.is_open("r")
    worker.read_all()
    reply = world.final("r")
    assert reply.result.finish_reason == "cancelled" if isinstance(request_, Generate) else reply.error.code == "cancelled"
    world.ask(ContextDrop(context="n"), "d")
    world.run()
    assert not world.shm, "a lease was left behind"


@pytest.mark.parametrize("why", ["cancelled", "deadline"])
@pytest.mark.parametrize("died_before", [False, True])
def test_what_was_streamed_is_the_answer_when_its_worker_dies_while_it_is_called_off(world, why, died_before):
    one = world.hello("w0")
    world.ask(Generate(text="a", max_tokens=9, stream=True, n=2, deadline_ms=1000), "g")
    one.read_all()
    for _ in range(3):
        one.step()
    if died_before:
        one.die()  # it waits for another worker then
    if why == "cancelled":
        world.ask(Cancel(id="g"), "x")
    else:
        world.now += 1
        world.handle(Tick())
    if not died_before:
        assert world.is_open("g")
        one.die()
    got = world.result("g")
    assert got.finish_reason == why and [len(s.tokens) for s in got.samples] == [2, 1]
    for i, sample in enumerate(got.samples):
        assert sample.tokens == tuple(t for c in world.chunks("g") if c.sample == i for t in c.tokens)
    assert got.seed is not None and world.stats.requests_active == 0


def test_a_hanging_worker_is_killed_in_time_and_its_job_goes_on(world_of):
    """SIGSTOP: nothing is said any more. Killed `worker_timeout_s` after the first Ping without an answer, not before; its job
    starts again elsewhere and repeats nothing; the one that answers its Pings lives, however long its pass."""
    world = world_of(worker_timeout_s=5.0, heartbeat_s=1.0)
    hung, busy = world.hello("w0"), world.hello("w1")
    world.ask(Generate(text="a", max_tokens=4, stream=True, sampling=Sampling(seed=3)), "g")
    hung.read_all()
    hung.step()
    began = world.now
    while not world.killed:
        world.now += 0.25
        world.handle(Tick())
        busy.read_all()
        assert world.now - began < 7
    assert world.killed == ["w0"] and world.now - began >= 5.0
    assert sum(isinstance(m, Ping) for m in hung.inbox) == 1
    world.ask(Generate(text="b", max_tokens=1), "new")
    assert not any(type(m).__name__ == "Assign" for m in hung.inbox), "a condemned worker got work"
    hung.die()
    world.run()
    got = world.result("g")
    assert got.worker == "w1" and got.attempts == 2 and len(got.tokens) == 4
    assert tuple(t for c in world.chunks("g") for t in c.tokens) == got.tokens
    assert world.stats.workers_lost == 1 and world.stats.jobs_retried == 1


# ---- stats


def test_stats_add_up(world):
    worker = world.hello("w0.1")
    world.ask(ContextCreate(text="x" * 100, name="n", space="a"), "c")
    world.run()
    world.ask(Generate(context="n", text="abc", max_tokens=4, space="a"), "g")
    world.ask(Generate(text="abcd", max_tokens=2), "h")
    world.run()
    world.handle(WorkerSaid("w0.1", Pong(1, passes=20, tokens_prefilled=107, tokens_generated=6, contexts_mapped=1, rss_bytes=5)))
    world.handle(WorkerSaid("w0.1", Forgotten("nothing")))
    world.handle(Dropped(2))
    stats = world.stats
    assert stats.spaces["a"].tokens_reused == 100 and stats.spaces["a"].tokens_prefilled == 103
    assert stats.spaces["default"].tokens_generated == 2 and stats.spaces["a"].requests == 2
    assert stats.tokens_prefilled == sum(s.tokens_prefilled for s in stats.spaces.values()) == 107
    assert (stats.attach_count, stats.attach_us) == (1, 2)
    assert sum(stats.store_bytes_by_kind.values()) == stats.store_bytes == stats.spaces["a"].bytes
    (seen,) = stats.fleet
    assert (seen.worker, seen.jobs_done, seen.passes, seen.rss_bytes, seen.slots, seen.busy) == ("w0.1", 3, 20, 5, 1, 0)
    assert stats.messages_dropped == 3 and stats.worker_restarts == 0
    worker.die()
    world.hello("w0.2")
    stats = world.stats
    assert stats.passes == 20 and stats.worker_restarts == 1 and stats.workers_lost == 1


def test_spaces_do_not_fill_the_memory(world):
    for i in range(1100):
        world.machine.handle(_received(Stats(space=f"s{i}")), world.now)
    assert len(world.stats.spaces) == 1024


def _received(request):
    from geist_pool.broker.events import Received

    return Received((b"p",), b"r", request, False, False)


# ---- stories


def test_story_of_a_request_a_job_a_context_and_a_worker(world):
    world.hello()
    world.ask(ContextCreate(text="abc", name="n"), "make")
    world.run()
    context = world.result("make").context.id
    world.ask(Generate(context="n", text="d", max_tokens=1), "ask")
    world.run()
    world.ask(Story(id="ask"), "s1")
    events = world.result("s1").events
    assert [e.what for e in events] == ["received", "text", "held", "waiting", "assigned", "ended", "ended"]
    assert events[0].fields == {"request": "ask", "job": "j2"}
    assert events[4].fields["worker"] == "w0" and events[4].fields["context"] == context
    assert [e.at for e in events] == sorted(e.at for e in events)
    world.ask(Story(id=context), "s2")
    assert {e.fields.get("job") for e in world.result("s2").events} >= {"j1", "j2"}
    world.ask(Story(id="w0"), "s3")
    assert world.result("s3").events[0].what == "ready"
    world.ask(Story(id="j1"), "s4")
    assert world.result("s4").events[-1].what == "ended"


def test_a_story_is_of_its_own_space_only(world):
    world.hello()
    world.ask(ContextCreate(text="abc", name="n", space="a"), "make")
    world.run()
    context = world.result("make").context.id
    for i, key in enumerate(("make", context, "j1")):
        world.ask(Story(id=key, space="b"), f"s{i}")
        assert world.result(f"s{i}").events == ()
    world.ask(Story(id="w0", space="b"), "w")
    assert all("job" not in e.fields and "context" not in e.fields for e in world.result("w").events)
    world.ask(Story(id="w0", space="a"), "v")
    assert any(e.fields.get("job") == "j1" for e in world.result("v").events)


def test_a_story_holds_no_text_and_is_bounded(world):
    world.hello()
    for i in range(1500):
        world.ask(Generate(text="secret", max_tokens=1), f"r{i}")
        world.run()
    world.ask(Story(id="w0"), "s")
    assert "secret" not in repr(world.result("s"))
    world.ask(Story(id="r0"), "gone")
    assert world.result("gone").events == ()
    world.ask(Story(id="r1499"), "there")
    assert len(world.result("there").events) == 7


def test_ids_that_are_no_text_are_told_in_hexadecimal(world):
    world.hello()
    world.ask(Generate(text="a", max_tokens=1), b"\xff\x00")
    world.run()
    world.ask(Story(id="hex:ff00"), "s")
    assert world.result("s").events[0].fields["request"] == "hex:ff00"


# ---- adoption


def test_a_context_whose_ancestor_is_gone_is_adopted_and_used(world_of):
    before = world_of()
    before.hello()
    before.ask(ContextCreate(text="x" * 100, name="root"), "1")
    before.run()
    before.ask(ContextCreate(on="root", text="y" * 100, name="leaf"), "2")
    before.run()
    before.ask(ContextDrop(context="root"), "d")
    before.run()
    entry = before.machine.books.directory.find("default", "leaf")
    tokens = tuple(map(ord, "x" * 100 + "y" * 100))
    world = world_of(adopt=Adopted((AdoptedContext(entry.envelope, entry.ref(), tokens),), ()))
    world.shm = dict(before.shm)
    world.hello()
    assert world.stats.store_bytes_by_kind["orphaned"] > 0
    assert world.stats.store_bytes == sum(n for n, _ in world.shm.values())
    world.ask(Generate(context="leaf", text="z", max_tokens=1), "g")
    world.run()
    assert world.result("g").usage.reused == 200
    world.ask(ContextDrop(context="leaf"), "e")
    world.run()
    assert not world.shm and world.stats.store_bytes == 0

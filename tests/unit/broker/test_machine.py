"""Property: the broker's machine answers each request exactly once, and as the protocol says, whatever workers and clients do.
Tolerance: none, everything is exact (sums of log-probabilities are math.fsum's). Reason: a lost or doubled answer, or one from
another context, is the fault that this project must not have.
"""

from __future__ import annotations

import math

import pytest

from geist_pool.broker.events import Adopted, AdoptedContext, ClientGone, Stop, Tick, WorkerSaid
from geist_pool.errors import BadRequest
from geist_pool.protocol import (
    Announce,
    Assign,
    Cancel,
    CancelJob,
    ContextCreate,
    ContextDrop,
    ContextGet,
    ContextList,
    Done,
    ErrorBody,
    Failed,
    Generate,
    GenerateDone,
    Info,
    Mapped,
    Message,
    Mismatch,
    Ping,
    Said,
    Sampling,
    Score,
    Shutdown,
    Stats,
    Timings,
    Tokenize,
    Tokens,
    Usage,
)


def text_of(result):
    return result.text


# ---- the plain ways


def test_info_and_stats_before_any_worker(world):
    world.ask(Info(), "i")
    world.ask(Stats(), "s")
    assert world.result("i").workers == 0 and world.result("i").model == "toy" and world.result("i").fingerprint == ""
    assert world.result("s").requests == {"info": 1, "stats": 1}


def test_info_after_hello(world):
    world.hello("w0", slots=2)
    world.ask(Info(), "i")
    info = world.result("i")
    assert (info.workers, info.slots, info.n_ctx, info.fingerprint) == (1, 2, 1000, "ab" * 32)


def test_contexts_of_an_earlier_life_are_waited_for(world_of):
    """FINDINGS row 5 (after the broker's restart): a request that names a context waits until shared memory has been looked
    through, finds it, and reuses it whole."""
    before = world_of()
    before.hello()
    before.ask(ContextCreate(text="once upon", name="tale"), "c")
    before.run()
    entry = before.machine.books.directory.find("default", "tale")
    found = Adopted((AdoptedContext(entry.envelope, entry.ref(), tuple(map(ord, "once upon"))),), ("/gp-stray",))
    world = world_of(adopt=found)
    world.shm = dict(before.shm)
    world.ask(ContextList(), "list")
    world.ask(ContextGet(context="tale"), "get")
    world.ask(Generate(context="tale", text=" a time", max_tokens=2), "gen")
    world.ask(ContextDrop(context="nobody"), "drop")
    assert all(world.is_open(rid) for rid in ("list", "get", "gen", "drop"))
    world.hello()
    world.run()
    assert world.result("list").contexts == (world.result("get").context,) and world.unlinked == ["/gp-stray"]
    assert world.result("gen").usage == Usage(reused=9, prefilled=7, generated=2)
    assert world.error("drop").code == "unknown_context"


def test_tokenize_needs_no_worker(world):
    world.ask(Tokenize(text="ab"), "t")
    assert world.result("t").tokens == (97, 98)


def test_requests_before_workers_wait(world):
    world.ask(Generate(text="hello", max_tokens=3), "g")
    assert world.is_open("g")
    world.hello()
    world.run()
    assert len(world.result("g").tokens) == 3


def test_context_then_generate_by_name_and_id(world):
    world.hello()
    world.ask(ContextCreate(text="once upon", name="tale"), "c")
    world.run()
    made = world.result("c")
    assert made.created and made.context.name == "tale" and made.context.n_tokens == 9
    for rid, reference in (("n", "tale"), ("i", made.context.id)):
        world.ask(Generate(context=reference, text=" a time", max_tokens=4), rid)
        world.run()
        got = world.result(rid)
        assert got.context == made.context.id
        # FINDINGS row 5: tokens prefilled are in the reply and equal the suffix's length
        assert got.usage == Usage(reused=9, prefilled=7, generated=4)
        assert got.raw == bytes(got.tokens) and got.text == got.raw.decode()


def test_whole_prompt_finds_the_longest_context(world):
    world.hello()
    for text in ("abc", "abcdef", "abcxyz"):
        world.ask(ContextCreate(text=text), text)
        world.run()
    world.ask(Generate(text="abcdefgh", max_tokens=1, sampling=Sampling(seed=7)), "g")
    world.run()
    got = world.result("g")
    assert got.context == world.result("abcdef").context.id
    assert got.usage == Usage(reused=6, prefilled=2, generated=1)
    assert got.seed == 7


def test_findings_row_2_no_match_is_not_a_hit(world):
    """FINDINGS row 2: where no context's tokens are a prefix, none is used, and the reply says how far the nearest one went."""
    world.hello()
    world.ask(ContextCreate(text="abcdef"), "c")
    world.run()
    world.ask(Generate(text="abcxef and more", max_tokens=2), "g")
    world.run()
    got = world.result("g")
    assert got.context is None and got.usage.reused == 0 and got.usage.prefilled == 15
    assert got.mismatch == Mismatch(context=world.result("c").context.id, position=3)
    # the same without a context of any kind: the same answer
    world.ask(Generate(text="abcxef and more", max_tokens=2, space="empty", sampling=Sampling(seed=got.seed)), "h")
    world.run()
    assert world.result("h").tokens == got.tokens and world.result("h").mismatch is None


def test_findings_row_7_suffix_of_nothing(world):
    """FINDINGS row 7 (broker's part): the whole context and nothing else is a hit with an empty suffix."""
    world.hello()
    world.ask(ContextCreate(text="abc", name="n"), "c")
    world.run()
    world.ask(Generate(context="n", max_tokens=1), "by-name")
    world.ask(Generate(text="abc", max_tokens=1), "by-content")
    world.run()
    for rid in ("by-name", "by-content"):
        assert world.result(rid).usage == Usage(reused=3, prefilled=0, generated=1)


def test_context_on_context_and_chain(world):
    worker = world.hello()
    world.ask(ContextCreate(text="x" * 100, name="root"), "1")
    world.run()
    world.ask(ContextCreate(on="root", text="y" * 100, name="leaf"), "2")
    world.run()
    leaf = world.result("2")
    assert leaf.base == leaf.context.parent == world.result("1").context.id and leaf.context.n_tokens == 200
    world.ask(Generate(context="leaf", text="z", max_tokens=1), "g")
    (assign,) = [m for m in worker.inbox if isinstance(m, Assign)]
    assert [(r.n_tokens, r.first_block, r.n_blocks) for r in assign.chain] == [(100, 0, 1), (200, 1, 2)]
    world.run()


def test_create_finds_its_base_by_content(world):
    world.hello()
    world.ask(ContextCreate(text="abc"), "1")
    world.run()
    world.ask(ContextCreate(text="abcdef"), "2")
    world.run()
    assert world.result("2").base == world.result("1").context.id
    assert world.result("2").usage == Usage(reused=3, prefilled=3)


def test_existing_context_is_returned_and_named(world):
    world.hello()
    world.ask(ContextCreate(text="abc"), "1")
    world.run()
    world.ask(ContextCreate(text="abc", name="late", pin=True), "2")
    again = world.result("2")
    assert not again.created and again.context.id == world.result("1").context.id
    assert again.context.name == "late" and again.context.pinned and again.usage == Usage(reused=3)
    # a suffix of nothing on a context is that context
    world.ask(ContextCreate(on="late", name="other"), "3")
    assert world.result("3").context.id == again.context.id
    world.ask(ContextGet(context="late"), "old-name-still-leads-there")
    assert world.result("old-name-still-leads-there").context.name == "other"


def test_identical_creates_share_one_job(world):
    worker = world.hello()
    for i, name in enumerate(("a", "b", None)):
        world.ask(ContextCreate(text="same", name=name), f"c{i}", peer=b"p%d" % i)
    assert len([m for m in worker.inbox if isinstance(m, Assign)]) == 1
    world.run()
    results = [world.result(f"c{i}", b"p%d" % i) for i in range(3)]
    assert [r.created for r in results] == [True, False, False]
    assert len({r.context.id for r in results}) == 1
    for name in ("a", "b"):
        world.ask(ContextGet(context=name), f"get-{name}")
        assert world.result(f"get-{name}").context.id == results[0].context.id


def test_name_is_rebound_when_the_new_one_is_sealed(world):
    worker = world.hello()
    world.ask(ContextCreate(text="old", name="n"), "1")
    world.run()
    world.ask(ContextCreate(text="new one", name="n"), "2")
    world.ask(ContextGet(context="n"), "meanwhile")
    assert world.result("meanwhile").context.n_tokens == 3
    worker.finish_all()
    world.ask(ContextGet(context="n"), "after")
    assert world.result("after").context.n_tokens == 7
    world.ask(ContextGet(context=world.result("1").context.id), "by-id")
    assert world.result("by-id").context.name is None


def test_messages_are_kept_with_a_context(world):
    world.hello()
    world.ask(ContextCreate(messages=(Message("system", "be brief"),), name="m"), "1")
    world.run()
    world.auto_text = False
    world.ask(Generate(context="m", messages=(Message("user", "hi"),), max_tokens=1), "g")
    (job,) = world.texts
    assert job.context_messages == (Message("system", "be brief"),) and not job.add_bos and job.add_generation_prompt
    assert len(job.context_tokens) == world.result("1").context.n_tokens
    world.finish_text()
    world.run()
    assert world.result("g").context == world.result("1").context.id


def test_score(world):
    world.hello()
    world.ask(Score(text="mood: ", labels=("happy", (1, 2, 3), "sad")), "s")
    world.run()
    got = world.result("s")
    for label in got.labels:
        assert label.sum == math.fsum(label.logprobs) and label.mean == label.sum / len(label.tokens)
        assert all(p <= 0 for p in label.logprobs)
    assert got.labels[1].tokens == (1, 2, 3)
    assert got.best == max(range(3), key=lambda i: got.labels[i].sum)
    assert got.best_mean == max(range(3), key=lambda i: got.labels[i].mean)


def test_ties_go_to_the_lower_label(world):
    world.hello()
    world.ask(Score(text="x", labels=("bb", "aa", "bb")), "s")
    world.run()
    sums = [label.sum for label in world.result("s").labels]
    assert world.result("s").best == sums.index(max(sums))


# ---- spaces


def test_spaces_do_not_see_each_other(world):
    world.hello()
    world.ask(ContextCreate(text="abc", name="n", space="a"), "1")
    world.run()
    context = world.result("1").context.id
    for rid, request in {
        "get": ContextGet(context=context, space="b"),
        "drop": ContextDrop(context="n", space="b"),
        "gen": Generate(context="n", space="b", max_tokens=1),
    }.items():
        world.ask(request, rid)
        assert world.error(rid).code == "unknown_context"
    world.ask(ContextList(space="b"), "list")
    assert world.result("list").contexts == ()
    world.ask(Generate(text="abcd", max_tokens=1, space="b"), "g")
    world.run()
    assert world.result("g").context is None and world.result("g").mismatch is None


def test_spaces_take_turns(world):
    worker = world.hello()
    for i in range(4):
        world.ask(Generate(text="a", max_tokens=1, space="big"), f"big{i}")
    world.ask(Generate(text="a", max_tokens=1, space="small"), "small")
    worker.read_all()
    worker.step()
    worker.read_all()
    worker.step()  # big0, then one of each space in turn
    worker.read_all()
    worker.step()
    assert not world.is_open("small") and world.is_open("big2")


# ---- refusals before a worker sees anything


@pytest.mark.parametrize(
    ("request_", "code", "path"),
    [
        (Generate(text="a", tokens=(1,)), "bad_request", "tokens"),
        (Generate(messages=(Message("user", "a"),), tokens=(1,)), "bad_request", "tokens"),
        (Generate(), "bad_request", "text"),
        (Generate(text=""), "bad_request", "text"),
        (ContextCreate(tokens=()), "bad_request", "tokens"),
        (Generate(text="a", stop=("x\0",)), "bad_request", "stop[0]"),
        (Generate(text="a", stop=("x", "y" * 257)), "bad_request", "stop[1]"),
        (ContextCreate(text="a", name="x\0y"), "bad_request", "name"),
        (ContextCreate(text="a", name="\u00e9" * 100), "bad_request", "name"),
        (Generate(text="a", space="\0"), "bad_request", "space"),
        (Generate(text="\ud800"), "bad_request", "text"),
        (Score(text="a", labels=("x", "")), "bad_request", "labels[1]"),
        (Score(text="a", labels=((1,), ())), "bad_request", "labels[1]"),
        (Score(text="a", labels=((1,) * 65,)), "bad_request", "labels[0]"),
        (Generate(context="nobody", text="a"), "unknown_context", "context"),
        (ContextCreate(on="nobody", text="a"), "unknown_context", "on"),
        (ContextDrop(context="nobody"), "unknown_context", "context"),
        (ContextGet(context="nobody"), "unknown_context", "context"),
        (Cancel(id="hex:zz"), "bad_request", "id"),
    ],
)  # fmt: skip
def test_refused(world, request_, code, path):
    worker = world.hello()
    world.ask(request_, "r")
    assert (world.error("r").code, world.error("r").path) == (code, path)
    assert not worker.inbox
    world.ask(Generate(text="still", max_tokens=1), "after")
    world.run()
    assert world.result("after").finish_reason == "length"


@pytest.mark.parametrize(
    ("request_", "path", "tokens"),
    [
        (Generate(text="a" * 1000, max_tokens=1), "text", 1001),
        (Generate(text="a" * 999, max_tokens=2), "max_tokens", 1001),
        (ContextCreate(text="a" * 1001), "text", 1001),
        (Score(text="a" * 990, labels=("b", "c" * 11)), "labels[1]", 1001),
    ],
)
def test_too_long_names_both_numbers(world, request_, path, tokens):
    world.hello()
    world.ask(request_, "r")
    error = world.error("r")
    assert (error.code, error.path, error.data) == ("too_long", path, {"tokens": tokens, "limit": 1000})


def test_exactly_full_is_not_too_long(world):
    world.hello()
    world.ask(Generate(text="a" * 990, max_tokens=10), "g")
    world.ask(ContextCreate(text="b" * 1000), "c")
    world.run()
    assert len(world.result("g").tokens) == 10 and world.result("c").context.n_tokens == 1000


def test_stream_is_refused_on_req(world):
    world.ask(Generate(text="a", stream=True), "g", stream_ok=False)
    assert (world.error("g").code, world.error("g").path) == ("bad_request", "stream")


def test_id_in_flight_is_refused_and_the_first_goes_on(world):
    world.hello()
    world.ask(Generate(text="a", max_tokens=1), "r")
    world.ask(Info(), "r")
    assert (world.error("r").code, world.error("r").path) == ("bad_request", "id")
    world.ask(Info(), "r", peer=b"another client")
    assert world.result("r", b"another client").protocol == 1
    world.run()
    assert world.result("r").finish_reason == "length"


def test_text_errors_and_malformed_requests_reach_the_client(world):
    from geist_pool.broker.events import TextReady
    from geist_pool.broker.text_types import TextDone

    world.hello()
    world.auto_text = False
    world.ask(Generate(tokens=(999999,)), "r")
    world.handle(TextReady(TextDone(key=world.texts.pop().key, error=BadRequest("outside", path="tokens[0]"))))
    assert world.error("r").path == "tokens[0]"
    world.ask(BadRequest("no message", path="body"), "m")
    assert world.error("m").code == "bad_request"


def test_full_queue_is_busy(world_of):
    world = world_of(queue=3)
    for i in range(4):
        world.ask(Generate(text="a"), f"r{i}")  # no worker is there yet
    assert world.error("r3").code == "busy" and world.error("r3").retry_after > 0
    world.ask(Stats(), "s")
    assert world.result("s").queue == 3


# ---- order


def test_text_that_is_done_sooner_does_not_overtake(world):
    worker = world.hello()
    world.auto_text = False
    world.ask(Generate(text="first", max_tokens=1), "1")
    world.ask(Generate(text="second", max_tokens=1), "2")
    world.finish_text(1)
    assert not worker.inbox
    world.finish_text(0)
    worker.read_all()
    worker.step()
    assert not world.is_open("1") and world.is_open("2")
    world.run()


def test_another_client_does_not_wait_for_slow_text(world):
    world.hello()
    world.auto_text = False
    world.ask(Generate(text="slow", max_tokens=1), "1", peer=b"a")
    world.ask(Generate(text="quick", max_tokens=1), "2", peer=b"b")
    world.finish_text(1)
    world.run()
    assert not world.is_open("2", b"b") and world.is_open("1", b"a")


# ---- streams


def test_stream_chunks_are_the_answer(world):
    world.hello()
    world.ask(Generate(text="a", max_tokens=5, stream=True), "g")
    world.run()
    chunks = world.chunks("g")
    assert tuple(t for c in chunks for t in c.tokens) == world.result("g").tokens
    assert "".join(c.text for c in chunks) == world.result("g").text
    assert [c.index for c in chunks] == [0, 1, 2, 3, 4]


def test_stream_after_a_death_repeats_nothing(world):
    first = world.hello("w0")
    world.ask(Generate(text="a", max_tokens=6, stream=True), "g")
    first.read_all()
    for _ in range(3):
        first.step()
    first.die()
    second = world.hello("w1")
    (assign,) = [m for m in second.inbox if isinstance(m, Assign)]
    seen = tuple(t for c in world.chunks("g") for t in c.tokens)
    assert assign.work.said == (Said(seen),) and len(seen) == 3, "it is drawn again"
    world.run()
    got = world.result("g")
    assert tuple(t for c in world.chunks("g") for t in c.tokens) == got.tokens and len(got.tokens) == 6
    assert got.attempts == 2 and got.worker == "w1"
    world.ask(Generate(text="a", max_tokens=6, sampling=Sampling(seed=got.seed)), "again")
    world.run()
    assert world.result("again").tokens == got.tokens


def test_second_attempt_cut_short_does_not_take_back_what_was_seen(world):
    """Found by the random events: three tokens streamed, a death, and the second attempt is cancelled before it has caught up."""
    first = world.hello("w0")
    world.ask(Generate(text="a", max_tokens=6, stream=True), "g")
    first.read_all()
    for _ in range(3):
        first.step()
    first.die()
    second = world.hello("w1")
    second.read_all()
    world.ask(Cancel(id="g"), "x")
    second.read_all()
    got = world.result("g")
    assert got.finish_reason == "cancelled" and len(got.tokens) == 3 and got.raw == bytes(got.tokens)
    assert tuple(t for c in world.chunks("g") for t in c.tokens) == got.tokens


def test_characters_in_a_stream_are_whole(world):
    """Bytes of one character in two messages: text comes when it is whole; what never becomes one is U+FFFD at the end."""
    worker = world.hello()
    world.ask(Generate(text="a", max_tokens=3, stream=True), "g")
    (assign,) = [m for m in worker.inbox if isinstance(m, Assign)]
    worker.inbox.clear()
    word = "\u00e9".encode()
    for i, data in enumerate((word[:1], word[1:], b"\xff\xc3")):
        world.handle(WorkerSaid("w0", Tokens(assign.job, 1, i, (200 + i,), data, None, min(i, 2))))
    done = GenerateDone((200, 201, 202), word + b"\xff\xc3", "length", None, None)
    world.handle(WorkerSaid("w0", Done(assign.job, 1, done, Usage(), Timings())))
    assert [c.text for c in world.chunks("g")] == ["", "\u00e9", "\ufffd", "\ufffd"]
    assert world.result("g").text == "\u00e9\ufffd\ufffd" and world.result("g").raw == word + b"\xff\xc3"


def test_a_gap_in_a_stream_condemns_the_worker(world):
    worker = world.hello()
    world.ask(Generate(text="a", max_tokens=3, stream=True), "g")
    (assign,) = [m for m in worker.inbox if isinstance(m, Assign)]
    world.handle(WorkerSaid("w0", Tokens(assign.job, 1, 1, (5,), b"x", None, 1)))
    assert world.killed == ["w0"]
    worker.die()
    world.hello("w1")
    world.run()
    assert world.result("g").attempts == 2


# ---- cancelling


def test_findings_row_18_cancel_frees_only_that(world):
    """FINDINGS row 18: cancelling a queued request, or one in flight, ends that one and no other."""
    worker = world.hello()
    for i in range(4):
        world.ask(Generate(text="abc", max_tokens=4), f"r{i}")
    worker.read_all()
    worker.step()
    worker.step()
    world.ask(Cancel(id="r2"), "x")  # in the queue
    assert world.result("x").found and world.error("r2").code == "cancelled"
    world.ask(Cancel(id="r0"), "y")  # in flight
    assert world.result("y").found
    worker.read_all()
    got = world.result("r0")
    assert got.finish_reason == "cancelled" and len(got.tokens) == 2
    world.run()
    assert world.result("r1").finish_reason == world.result("r3").finish_reason == "length"
    world.ask(Cancel(id="r1"), "z")
    assert not world.result("z").found


def test_cancel_by_hexadecimal_id_and_only_of_the_same_client(world):
    world.ask(Generate(text="a"), b"\xff\x00", peer=b"a")
    world.ask(Cancel(id="hex:ff00"), "1", peer=b"b")
    assert not world.result("1", b"b").found
    world.ask(Cancel(id="hex:ff00"), "2", peer=b"a")
    assert world.result("2", b"a").found and world.error(b"\xff\x00", b"a").code == "cancelled"


@pytest.mark.parametrize("state", ["early", "text", "held", "waiting", "reserving"])
def test_cancel_in_every_state_of_the_queue(world_of, state):
    world = world_of(memory=60_000)  # room for two contexts
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
    world.auto_text = state not in ("text", "held")
    world.ask(ContextCreate(text="abc"), "r")
    if state == "held":
        world.finish_text(1)
    (job,) = [j for j in world.machine.books.jobs.values() if j.tickets[0].request_id == b"r"]
    assert job.state == state
    world.ask(ContextCreate(text="abd"), "behind")
    world.ask(Cancel(id="r"), "x")
    assert world.result("x").found and world.error("r").code == "cancelled" and world.is_open("behind")
    world.auto_text = True
    while world.texts:
        world.finish_text()
    if not world.workers:
        world.hello()
    world.run()
    assert world.result("behind").created


def test_score_in_flight_is_cancelled_with_an_error(world):
    worker = world.hello()
    world.ask(Score(text="a", labels=("b",)), "s")
    worker.read_all()
    world.ask(Cancel(id="s"), "x")
    worker.read_all()
    assert world.error("s").code == "cancelled" and not worker.jobs


def test_a_cancelled_create_leaves_the_others_who_joined_it(world):
    worker = world.hello()
    world.ask(ContextCreate(text="same"), "1", peer=b"a")
    world.ask(ContextCreate(text="same"), "2", peer=b"b")
    worker.read_all()
    world.ask(Cancel(id="1"), "x", peer=b"a")
    assert world.error("1", b"a").code == "cancelled"
    world.run()
    assert not world.result("2", b"b").created


def test_a_create_behind_its_cancelled_twin(world):
    """The first is being cancelled, the same tokens are asked for again, and the first finishes after all."""
    one, two = world.hello("w0"), world.hello("w1")
    world.ask(ContextCreate(text="same"), "1")
    one.read_all()
    world.ask(Cancel(id="1"), "x")
    world.ask(ContextCreate(text="same"), "2")
    two.read_all()
    one.step()  # before it reads that it is cancelled
    assert world.result("1").created
    two.step()
    assert world.result("2").context.id == world.result("1").context.id
    world.run()
    assert len(world.shm) == 1 and len(world.machine.books.directory.sealed()) == 1


def test_gone_client_is_silent_and_its_work_ends(world):
    worker = world.hello()
    world.ask(Generate(text="a", max_tokens=50), "1", peer=b"gone")
    world.ask(Generate(text="a", max_tokens=50), "2", peer=b"gone")
    world.ask(Generate(text="b", max_tokens=1), "3", peer=b"here")
    worker.read_all()
    worker.step()
    world.handle(ClientGone(b"gone"))
    world.now += world.machine.books.config.linger_s
    world.handle(Tick())
    assert any(isinstance(m, CancelJob) and not m.finish for m in worker.inbox)
    worker.read_all()
    world.run()
    assert not [r for r in world.replies if r.route[0] == b"gone"]
    assert world.result("3", b"here").finish_reason == "length"


def test_client_that_does_not_read_hears_that_its_requests_ended(world):
    worker = world.hello()
    for name in ("1", "2"):
        world.ask(Generate(text="a", max_tokens=50, stream=True), name, peer=b"slow")
    worker.read_all()
    worker.step()
    world.handle(ClientGone(b"slow", "slow", dropped=7))
    assert any(isinstance(m, CancelJob) and not m.finish for m in worker.inbox)
    world.run()
    assert [world.error(name, b"slow").code for name in ("1", "2")] == ["cancelled"] * 2
    assert world.stats.chunks_dropped == 7


# ---- deadlines


def test_deadline_in_the_queue_and_in_flight(world):
    worker = world.hello()
    world.ask(Generate(text="a", max_tokens=9, deadline_ms=1000), "flight")
    world.ask(Generate(text="a", max_tokens=9, deadline_ms=1000), "queue")
    worker.read_all()
    worker.step()
    assert world.machine.wake_at() == world.now + 1.0
    world.now += 1.0
    world.handle(Tick())
    assert world.error("queue").code == "deadline"
    worker.read_all()
    assert world.result("flight").finish_reason == "deadline" and len(world.result("flight").tokens) == 1
    assert world.machine.wake_at() is None


# ---- workers that die or are silent


def test_a_job_that_kills_two_workers_is_refused(world):
    for name in ("w0", "w1"):
        world.hello(name)
    world.ask(Generate(text="poison", max_tokens=5), "g")
    for _ in range(2):
        (victim,) = [w for w in world.workers.values() if any(isinstance(m, Assign) for m in w.inbox)]
        victim.read_all()
        victim.die()
    assert world.error("g").code == "worker_lost"
    assert world.stats.workers_lost == 2 and world.stats.jobs_retried == 1
    world.hello("w2")
    world.ask(Generate(text="fine", max_tokens=1), "h")
    world.run()
    assert world.result("h").finish_reason == "length"


def test_a_retried_job_does_not_go_to_the_end_of_the_queue(world):
    one = world.hello("w0")
    for rid in ("1", "2", "3"):
        world.ask(Generate(text="a", max_tokens=1), rid)
    one.read_all()
    one.die()
    two = world.hello("w1")
    two.read_all()
    two.step()
    assert world.result("1").attempts == 2 and world.is_open("2") and world.is_open("3")
    world.run()


def test_create_is_retried_under_new_names(world):
    one = world.hello("w0")
    world.ask(ContextCreate(text="z" * 70), "c")
    one.read_all()
    first = one.jobs[next(iter(one.jobs))].assign.work.grant.ref
    world.shm[first.image] = (1, ())  # it had begun to write
    one.die()
    assert {first.image, first.kv} <= set(world.unlinked)
    world.hello("w1")
    world.run()
    assert world.result("c").created and len(world.shm) == 2 and first.image not in world.shm


def test_cancelled_job_of_a_dead_worker_is_not_retried(world):
    one = world.hello("w0")
    world.ask(Generate(text="a", max_tokens=5), "g")
    one.read_all()
    world.ask(Cancel(id="g"), "x")
    one.die()
    assert world.error("g").code == "cancelled"


def test_silent_worker_is_killed_and_its_jobs_go_on(world):
    worker = world.hello("w0")
    world.ask(Generate(text="a", max_tokens=1), "g")
    for _ in range(63):
        world.now += 1.0
        world.handle(Tick())
    assert world.killed == ["w0"] and sum(isinstance(m, Ping) for m in worker.inbox) == 1
    worker.die()
    world.hello("w1")
    world.run()
    assert world.result("g").worker == "w1"


def test_a_worker_that_answers_is_not_killed(world):
    worker = world.hello("w0")
    for _ in range(200):
        world.now += 1.0
        world.handle(Tick())
        worker.read_all()
    assert world.killed == []


def test_unlike_worker_is_refused(world):
    world.hello("w0")
    world.hello("w1", fingerprint="cd" * 32)
    world.hello("w2", protocol=2)
    assert world.killed == ["w1", "w2"]
    assert world.stats.workers == 1


def test_words_about_a_job_of_an_earlier_attempt_are_ignored(world):
    one = world.hello("w0")
    world.ask(Generate(text="a", max_tokens=2), "g")
    one.read_all()
    job = next(iter(one.jobs))
    one.die()
    world.hello("w1")
    late = Done(job, 1, GenerateDone((1,), b"x", "length", None, None), Usage(), Timings())
    world.handle(WorkerSaid("w0", late))
    world.handle(WorkerSaid("w1", late))
    assert world.is_open("g")
    world.run()
    assert len(world.result("g").tokens) == 2


def test_answer_of_the_wrong_kind_is_internal(world):
    worker = world.hello()
    world.ask(Score(text="a", labels=("b",)), "s")
    worker.read_all()
    (job,) = worker.jobs
    worker.jobs.clear()
    world.handle(WorkerSaid("w0", Done(job, 1, GenerateDone((1,), b"x", "length", None, None), Usage(), Timings())))
    assert world.error("s").code == "internal"


def test_worker_errors_reach_the_client(world):
    worker = world.hello()
    world.ask(ContextCreate(text="abc"), "c")
    worker.read_all()
    (job,) = worker.jobs
    worker.jobs.clear()
    world.handle(WorkerSaid("w0", Failed(job, 1, ErrorBody("store_full", "no room in /dev/shm", data={"needed": 5}))))
    assert world.error("c").code == "store_full" and world.error("c").data == {"needed": 5}
    assert world.machine.books.directory.used == 0


# ---- contexts and workers


def test_announced_to_all_and_preferred_where_mapped(world):
    world.hello("w0")
    world.hello("w1")
    world.ask(ContextCreate(text="abc", name="n"), "c")
    assert sum(isinstance(m, Assign) for m in world.workers["w0"].inbox) == 1
    world.workers["w0"].read_all()
    world.workers["w0"].step()
    assert all(any(isinstance(m, Announce) for m in w.inbox) for w in world.workers.values())
    world.workers["w0"].read_all()  # w0 has it mapped, w1 has not yet
    world.ask(Generate(context="n", max_tokens=1), "1")
    world.ask(Generate(context="n", max_tokens=1), "2")
    world.run()
    assert {world.result("1").worker, world.result("2").worker} == {"w0", "w1"} and world.result("1").worker == "w0"


def test_new_worker_hears_of_every_context(world):
    world.hello("w0")
    world.ask(ContextCreate(text="abc"), "c")
    world.run()
    late = world.hello("w1")
    assert [m.chain[-1].id for m in late.inbox if isinstance(m, Announce)] == [world.result("c").context.id]


def test_damaged_context_is_dropped(world):
    world.hello("w0")
    world.ask(ContextCreate(text="abc", name="n"), "c")
    world.run()
    context = world.result("c").context.id
    world.handle(WorkerSaid("w0", Mapped(context, ErrorBody("image_damaged", "flipped"))))
    world.ask(ContextGet(context="n"), "g")
    assert world.error("g").code == "unknown_context"
    world.run()
    assert world.stats.store_bytes == 0 and not world.shm


def test_context_that_cannot_be_attached_is_dropped(world):
    worker = world.hello("w0")
    world.ask(ContextCreate(text="abc", name="n"), "c")
    world.run()
    world.ask(Generate(context="n", max_tokens=1), "g")
    worker.read_all()
    (job,) = worker.jobs
    worker.jobs.clear()
    world.handle(WorkerSaid("w0", Failed(job, 1, ErrorBody("image_damaged", "flipped"))))
    assert world.error("g").code == "image_damaged"
    world.ask(Generate(text="abc", max_tokens=1), "h")
    world.run()
    assert world.result("h").context is None and world.result("h").usage.prefilled == 3


def test_dropped_context_finishes_who_holds_it(world):
    worker = world.hello()
    world.ask(ContextCreate(text="abc" * 50, name="n"), "c")
    world.run()
    world.ask(Generate(context="n", max_tokens=3), "flight")
    world.ask(Generate(context="n", max_tokens=3), "queue")
    worker.read_all()
    world.ask(ContextDrop(context="n"), "d")
    assert world.result("d").id == world.result("c").context.id
    world.ask(Generate(context="n", max_tokens=3), "late")
    assert world.error("late").code == "unknown_context"
    assert world.shm
    world.run()
    assert world.result("flight").usage.reused == world.result("queue").usage.reused == 150
    assert not world.shm and world.stats.store_bytes == 0


def test_ttl(world):
    world.hello()
    world.ask(ContextCreate(text="abc", name="n", ttl_s=10), "c")
    world.run()
    assert world.result("c").context.expires == world.now + 10
    world.now += 10
    world.handle(Tick())
    world.ask(ContextList(), "l")
    assert world.result("l").contexts == ()


# ---- the store's limit


def test_findings_row_17_above_the_limit_is_refused_before_the_work(world_of):
    """FINDINGS row 17: an image above the limit is refused with figures, and no worker sees it."""
    world = world_of(memory=30_000)
    worker = world.hello()
    world.ask(ContextCreate(text="a" * 900), "c")
    error = world.error("c")
    assert error.code == "store_full" and error.data["limit"] == 30_000 and error.data["needed"] > 30_000
    assert not worker.inbox


def test_findings_row_16_store_full_with_figures_when_nothing_can_go(world_of):
    """FINDINGS row 16 (broker's part): pinned contexts stay, the next one is refused with the figures, all others still work."""
    world = world_of(memory=60_000)
    world.hello()
    world.ask(ContextCreate(text="a" * 10, name="kept", pin=True), "1")
    world.ask(ContextCreate(text="b" * 10, pin=True), "2")
    world.run()
    world.ask(ContextCreate(text="c" * 10), "3")
    world.run()
    error = world.error("3")
    assert error.code == "store_full" and set(error.data) == {"needed", "limit", "used", "held"}
    assert error.data["held"] == error.data["used"] > 0
    world.ask(Generate(context="kept", max_tokens=1), "g")
    world.run()
    assert world.result("g").usage.reused == 10


def test_eviction_waits_until_workers_have_unmapped(world_of):
    world = world_of(memory=60_000)
    one, two = world.hello("w0"), world.hello("w1")
    for i in range(2):
        world.ask(ContextCreate(text=f"{i}" * 10), f"c{i}")
        world.run()
    used = world.stats.store_bytes
    world.ask(ContextCreate(text="x" * 10), "new")
    assert world.stats.evictions == 1 and world.stats.store_unmapping_bytes > 0 and world.stats.store_bytes == used
    one.finish_all()
    assert world.is_open("new")  # w1 has it mapped still
    two.finish_all()
    world.run()
    assert world.result("new").created and world.stats.store_bytes <= 60_000


def test_a_dead_worker_unmaps(world_of):
    world = world_of(memory=60_000)
    one, two = world.hello("w0"), world.hello("w1")
    for i in range(2):
        world.ask(ContextCreate(text=f"{i}" * 10), f"c{i}")
        world.run()
    world.ask(ContextCreate(text="x" * 10), "new")
    one.read_all()
    two.die()
    world.run()
    assert world.result("new").created


def test_waiting_for_memory_has_an_end(world_of):
    world = world_of(memory=60_000, reserve_timeout_s=5.0)
    world.hello("w0")
    for i in range(2):
        world.ask(ContextCreate(text=f"{i}" * 10), f"c{i}")
        world.run()
    world.ask(ContextCreate(text="x" * 10), "new")
    world.now += 6
    world.handle(Tick())
    assert world.error("new").code == "store_full"


# ---- the end


def test_stop_answers_everyone_and_leaves_nothing(world):
    worker = world.hello()
    world.ask(ContextCreate(text="abc"), "c")
    world.run()
    for i in range(3):
        world.ask(Generate(text="a", max_tokens=9), f"g{i}")
    world.ask(ContextCreate(text="unfinished"), "u")
    worker.read_all()
    world.handle(Stop())
    for rid in ("g0", "g1", "g2", "u"):
        assert world.error(rid).code == "stopping"
    assert not world.shm and any(isinstance(m, Shutdown) for m in worker.inbox)
    world.ask(Generate(text="late"), "late")
    assert world.error("late").code == "stopping"
    world.ask(Info(), "i")
    assert world.final("i").ok


def test_stop_with_kept_contexts(world_of):
    world = world_of(keep_contexts=True)
    world.hello()
    world.ask(ContextCreate(text="abc"), "c")
    world.run()
    kept = dict(world.shm)
    world.ask(ContextCreate(text="unfinished"), "u")
    world.handle(Stop())
    assert world.shm == kept


def test_story(world):
    world.hello()
    world.ask(Generate(text="a", max_tokens=1), "g")
    world.run()
    assert [c.after for c in world.machine.story("j1")] == ["text", "held", "waiting", "assigned", "ended"]

"""Property: a request that is sent again (same space, id and body) is computed once, and every connection that asked gets the one
answer; errors are never repeated from memory; what is remembered is bounded in time, number and bytes. Tolerance: none. Reason: a
client that lost its connection must be able to ask again without paying, or drawing, twice.
"""

from __future__ import annotations

from geist_pool.broker.events import ClientGone, Received, Tick, WorkerSaid
from geist_pool.broker.remembered import Remembered
from geist_pool.protocol import (
    Assign,
    Cancel,
    CancelJob,
    CancelResult,
    ContextCreate,
    ContextDrop,
    Done,
    Generate,
    GenerateDone,
    Message,
    Publish,
    Reply,
    Said,
    Sampling,
    Stats,
    Timings,
    Tokenize,
    TokenLogprob,
    Tokens,
    Usage,
)


def n_assigned(worker):
    return sum(isinstance(m, Assign) for m in worker.inbox) + len(worker.jobs)


def test_a_finished_request_gets_its_answer_again(world):
    worker = world.hello()
    request = Generate(text="a", max_tokens=3)  # no seed: computed again it would be another answer
    world.ask(request, "r", peer=b"one")
    world.run()
    world.handle(ClientGone(b"one"))
    world.ask(request, "r", peer=b"two")
    assert world.result("r", b"two") == world.result("r", b"one") and not worker.inbox
    assert world.stats.replies_replayed == 1
    for rid, other in (("other", request), ("r", Generate(text="a", max_tokens=4))):
        world.ask(other, rid, peer=b"two")
        assert n_assigned(worker) == 1, "another id or body is another request"
        world.run()
    world.ask(Generate(text="a", max_tokens=3, space="s"), "r", peer=b"two")
    assert n_assigned(worker) == 1, "and so is another space"


def test_a_stream_is_given_again_as_one_chunk(world):
    world.hello()
    request = Generate(text="a", max_tokens=3, stream=True, n=2)
    world.ask(request, "r", peer=b"one")
    world.run()
    world.ask(request, "r", peer=b"two")
    got = world.result("r", b"two")
    assert got == world.result("r", b"one")
    assert [(c.index, c.tokens, c.text, c.sample) for c in world.chunks("r", b"two")] == [
        (0, s.tokens, s.text, i) for i, s in enumerate(got.samples)
    ]


def test_asked_again_in_flight_on_another_connection(world):
    """The first connection may be dead without anybody knowing: both get the answer; the job lives while one of them waits."""
    worker = world.hello()
    request = Generate(text="a", max_tokens=4, stream=True)
    world.ask(request, "r", peer=b"one")
    worker.read_all()
    worker.step()
    worker.step()
    world.ask(request, "r", peer=b"two")
    assert [c.tokens for c in world.chunks("r", b"two")] == [tuple(t for c in world.chunks("r", b"one") for t in c.tokens)]
    world.handle(ClientGone(b"one"))
    world.ask(request, "r", peer=b"three")
    world.run()
    got = world.result("r", b"two")
    for peer in (b"two", b"three"):
        assert world.result("r", peer).tokens == got.tokens == tuple(t for c in world.chunks("r", peer) for t in c.tokens)
    assert got.attempts == 1 and world.stats.fleet[0].jobs_done == 1


def test_asked_again_in_flight_on_the_same_connection(world):
    worker = world.hello()
    request = Generate(text="a", max_tokens=4)
    digest = b"d" * 16
    world.asked[b"c", b"r"] = 1
    world.handle(Received((b"c", b"1", b""), b"r", request, False, False, digest))
    worker.read_all()
    world.handle(Received((b"c", b"2", b""), b"r", request, False, False, digest))
    world.run()
    (sent,) = [r for r in world.replies if r.request_id == b"r"]
    assert sent.route == (b"c", b"2", b"") and sent.reply.ok  # to the envelope of the later message, once
    world.asked[b"c", b"s"] = 2
    world.handle(Received((b"c",), b"s", request, False, False, digest))
    world.handle(Received((b"c",), b"s", Generate(text="b"), False, False, b"e" * 16))
    assert world.error("s").code == "bad_request" and world.error("s").path == "id"


def test_a_client_that_comes_back_in_time_finds_its_work_going_on(world):
    """Its connection ends in the middle of a stream, and it asks again on another one: nothing is computed twice."""
    worker = world.hello()
    request = Generate(text="a", max_tokens=4, stream=True)
    world.ask(request, "r", peer=b"one")
    worker.read_all()
    worker.step()
    world.handle(ClientGone(b"one"))
    n_sent = len(world.replies)
    worker.step()
    assert len(world.replies) == n_sent, "nobody is there to read it"
    world.ask(request, "r", peer=b"two")
    assert [len(c.tokens) for c in world.chunks("r", b"two")] == [2]
    world.now += world.machine.books.config.linger_s
    world.handle(Tick())
    world.run()
    got = world.result("r", b"two")
    assert tuple(t for c in world.chunks("r", b"two") for t in c.tokens) == got.tokens and len(got.tokens) == 4
    assert got.attempts == 1 and world.stats.fleet[0].jobs_done == 1 and not world.machine.books.tickets


def test_an_answer_that_came_while_its_client_was_away_is_remembered(world):
    worker = world.hello()
    request = Generate(text="a", max_tokens=2)
    world.ask(request, "r", peer=b"one")
    world.handle(ClientGone(b"one"))
    world.run()
    assert not [r for r in world.replies if r.request_id == b"r"] and not world.machine.books.tickets
    world.ask(request, "r", peer=b"two")
    assert len(world.result("r", b"two").tokens) == 2 and not worker.inbox and world.stats.replies_replayed == 1


def test_a_client_that_stays_away_is_waited_for_no_longer_than_that(world):
    worker = world.hello()
    request = Generate(text="a", max_tokens=40)
    world.ask(request, "r", peer=b"one")
    worker.read_all()
    world.handle(ClientGone(b"one"))
    world.now += 0.9 * world.machine.books.config.linger_s
    world.handle(Tick())
    assert not [m for m in worker.inbox if isinstance(m, CancelJob)]
    world.ask(request, "r", peer=b"one")  # back under the same name, and away again
    world.handle(ClientGone(b"one"))
    world.now += 0.9 * world.machine.books.config.linger_s
    world.handle(Tick())
    assert not [m for m in worker.inbox if isinstance(m, CancelJob)]
    world.now += 0.2 * world.machine.books.config.linger_s
    world.handle(Tick())
    assert [m for m in worker.inbox if isinstance(m, CancelJob)]
    world.run()
    assert not world.machine.books.jobs and not world.machine.books.leaving


def test_a_client_that_comes_and_goes_keeps_nobody_elses_work_alive(world):
    """Each is waited for from when it left last, whoever left before it and has been back since."""
    worker = world.hello(slots=2)
    request, linger = Generate(text="a", max_tokens=400), world.machine.books.config.linger_s
    world.ask(request, "r", peer=b"restless")
    world.handle(ClientGone(b"restless"))
    world.ask(request, "s", peer=b"other")
    world.handle(ClientGone(b"other"))
    for _ in range(8):
        world.now += linger / 4
        world.handle(Tick())
        world.ask(request, "r", peer=b"restless")
        world.handle(ClientGone(b"restless"))
    assert [key for key in world.machine.books.tickets if key[0] != b"s"] == [(b"restless", b"r")]
    assert len([m for m in worker.inbox if isinstance(m, CancelJob)]) == 1
    assert len(world.machine.books.leaving) <= 5, "every departure is remembered"


def test_who_comes_back_by_another_connection_is_the_only_one_who_waits(world):
    """So that its cancel and its deadline get what there is of the answer, as they would have before."""
    for name in ("w0", "w1"):
        worker = world.hello(name)
        request = Generate(text="a" + name, max_tokens=40, stream=name == "w0", deadline_ms=3000)
        world.ask(request, name, peer=b"one")
        busy = next(w for w in world.workers.values() if any(isinstance(m, Assign) for m in w.inbox))
        busy.read_all()
        busy.step()
        world.handle(ClientGone(b"one"))
        world.ask(request, name, peer=b"two")
        assert list(world.machine.books.tickets) == [(b"two", name.encode())]
        world.ask(Cancel(id=name), "x" + name, peer=b"two")
        busy.read_all()
        got = world.result(name, b"two")
        assert (got.finish_reason, len(got.tokens)) == ("cancelled", 1)
        assert not world.machine.books.jobs and not world.ended[b"one", name.encode()]
        assert worker.alive


def test_what_a_create_that_joined_said_is_not_lost_when_its_client_comes_back(world):
    """Two creates of the same tokens are one job; only the second one has messages."""
    world.auto_text = True
    worker = world.hello()
    world.ask(ContextCreate(text="user:hello;"), "a", peer=b"a")
    said = ContextCreate(messages=(Message("user", "hello"),))
    world.ask(said, "b", peer=b"one")
    assert len(world.machine.books.jobs) == 1
    world.handle(ClientGone(b"one"))
    world.ask(said, "b", peer=b"two")
    worker.finish_all()
    context = world.result("b", b"two").context
    assert world.machine.books.directory.entry(context.id).messages == said.messages


def test_of_creates_that_joined_each_one_is_waited_for(world):
    """That the client of one has come back says nothing about the other's."""
    worker = world.hello()
    request = ContextCreate(text="abc")
    for rid in ("a", "b"):
        world.ask(request, rid, peer=b"one" + rid.encode())
        world.handle(ClientGone(b"one" + rid.encode()))
    assert len(world.machine.books.jobs) == 1
    world.ask(request, "b", peer=b"two")
    assert set(world.machine.books.tickets) == {(b"onea", b"a"), (b"two", b"b")}
    world.ask(request, "a", peer=b"three")
    worker.finish_all()
    results = world.result("a", b"three"), world.result("b", b"two")
    assert [r.created for r in results] == [True, False] and results[0].context == results[1].context


def test_its_end_may_be_heard_of_twice(world):
    """By the monitor, and by a message that could not be sent: the time runs from the first."""
    worker = world.hello()
    world.ask(Generate(text="a", max_tokens=40), "r", peer=b"one")
    worker.read_all()
    for _ in range(3):
        world.handle(ClientGone(b"one"))
        world.now += 0.4 * world.machine.books.config.linger_s
    world.handle(Tick())
    assert [m for m in worker.inbox if isinstance(m, CancelJob)]


def test_what_cannot_be_asked_for_again_ends_with_its_connection(world):
    """What is computed anew whenever it is asked, and what no hash was made of."""
    worker = world.hello()
    world.auto_text = False
    world.ask(Tokenize(text="x"), "t", peer=b"one")
    world.handle(Received((b"one",), b"g", Generate(text="a"), True, False, b""))
    assert len(world.machine.books.tickets) == 2
    world.handle(ClientGone(b"one"))
    assert not world.machine.books.tickets and not world.machine.books.jobs and not worker.inbox


def test_what_was_said_goes_on_with_its_log_probabilities(world):
    first = world.hello("w0")
    world.ask(Generate(text="a", max_tokens=4, stream=True, logprobs=1, n=2), "r")
    first.read_all()
    (job,) = first.jobs
    logprobs = TokenLogprob(98, -0.5, ((98, -0.5),)), TokenLogprob(99, -1.5, ((98, -0.5),))
    for i, said in enumerate(logprobs):
        world.handle(WorkerSaid("w0", Tokens(job, 1, i, (said.token,), bytes([said.token]), (said,), i, 1)))
    first.die()
    second = world.hello("w1")
    (assign,) = [m for m in second.inbox if isinstance(m, Assign)]
    assert assign.work.said == (Said((), ()), Said((98, 99), logprobs))


def test_a_stream_that_has_ended_is_whole_for_who_asks_again(world):
    """Its context is still being made; a character that the answer breaks off in is U+FFFD for everyone."""
    worker = world.hello()
    request = Generate(text="a", max_tokens=3, stream=True, publish=Publish())
    world.ask(request, "r", peer=b"one")
    worker.read_all()
    (job,) = worker.jobs
    world.auto_text = False
    done = GenerateDone((97, 0xE2, 0x82), b"a\xe2", "length", None, None)
    world.handle(WorkerSaid("w0", Done(job, 1, done, Usage(), Timings())))
    world.handle(ClientGone(b"one"))
    world.ask(request, "r", peer=b"two")
    for peer in (b"one", b"two"):
        assert "".join(c.text for c in world.chunks("r", peer)) == "a\ufffd"


def test_back_under_its_old_name_a_client_may_use_its_ids_anew(world):
    worker = world.hello()
    digest = b"d" * 16
    world.handle(Received((b"c",), b"r", Generate(text="a", max_tokens=40), False, False, digest))
    worker.read_all()
    world.handle(ClientGone(b"c"))
    world.asked[b"c", b"r"] = 1
    world.handle(Received((b"c",), b"r", Generate(text="b", max_tokens=2), False, False, b"e" * 16))
    assert [m for m in worker.inbox if isinstance(m, CancelJob)], "nobody comes for what it asked before"
    world.run()
    assert len(world.result("r", b"c").tokens) == 2


def test_a_repeated_create_in_flight_is_created_for_both(world):
    world.hello()
    request = ContextCreate(text="abc", name="n")
    world.ask(request, "r", peer=b"one")
    world.ask(request, "r", peer=b"two")
    world.run()
    assert world.result("r", b"one").created and world.result("r", b"two") == world.result("r", b"one")


def test_a_context_that_is_gone_is_made_again(world):
    world.hello()
    request = ContextCreate(text="abc", name="n")
    world.ask(request, "r")
    world.run()
    world.ask(request, "r")
    assert world.result("r").created and world.stats.replies_replayed == 1
    drop = ContextDrop(context="n")
    world.ask(drop, "d")
    world.ask(drop, "d")
    assert world.result("d").id == world.result("r").context.id
    world.ask(request, "r")
    world.run()
    assert world.stats.contexts == 1 and world.stats.replies_replayed == 2


def test_refusals_are_not_remembered(world_of):
    world = world_of(queue=1)
    world.ask(Generate(text="a", max_tokens=1), "first")
    request = Generate(text="b", max_tokens=1)
    world.ask(request, "r")
    assert world.error("r").code == "busy"
    world.hello()
    world.run()
    world.ask(request, "r")
    world.run()
    assert world.result("r").finish_reason == "length"


def test_one_that_is_being_cancelled_is_not_joined(world):
    worker = world.hello()
    request = Generate(text="a", max_tokens=4, sampling=Sampling(seed=1))
    world.ask(request, "r", peer=b"one")
    worker.read_all()
    world.ask(Cancel(id="r"), "x", peer=b"one")
    world.ask(request, "r", peer=b"two")
    world.run()
    assert world.result("r", b"one").finish_reason == "cancelled" and world.result("r", b"two").finish_reason == "length"


def test_answers_are_forgotten_in_time(world):
    worker = world.hello()
    request = Generate(text="a", max_tokens=1)
    world.ask(request, "r")
    world.run()
    world.now += 59
    world.handle(Tick())
    world.ask(request, "r")
    assert n_assigned(worker) == 0
    world.now += 1
    world.handle(Tick())
    assert len(world.machine.books.remembered) == 0
    world.ask(request, "r")
    assert n_assigned(worker) == 1
    world.run()


def test_what_is_remembered_is_bounded():
    reply = Reply(ok=True, result=CancelResult(found=True))
    memory = Remembered(seconds=10, replies=3, n_bytes=1 << 20)
    for i in range(5):
        memory.keep(("s", b"%d" % i, b""), reply, i)
        memory.validate()
    assert [memory.find(("s", b"%d" % i, b""), 5) is not None for i in range(5)] == [False, False, True, True, True]
    assert memory.find(("s", b"2", b""), 12) is None and len(memory) == 2
    size = memory.n_bytes // 2
    small = Remembered(seconds=10, replies=100, n_bytes=3 * size)
    for i in range(5):
        small.keep(("s", b"%d" % i, b""), reply, 0)
        small.validate()
    assert len(small) == 3
    tiny = Remembered(seconds=10, replies=100, n_bytes=size - 1)
    tiny.keep(("s", b"x", b""), reply, 0)
    assert len(tiny) == 0 and tiny.n_bytes == 0


def test_stats_are_never_from_memory(world):
    world.ask(Stats(), "s")
    world.ask(Stats(), "s")
    assert world.result("s").requests == {"stats": 2}

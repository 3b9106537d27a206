"""Property: a published, saved or loaded context is exactly the tokens that it says, takes the bytes that it takes and no more,
and an answer is never lost because it could not be kept. Tolerance: none. Reason: a game goes on from what a character has said;
a context that holds one token more or less is another conversation.
"""

from __future__ import annotations

import pytest

from geist_pool.broker import saved
from geist_pool.broker.content import unpack_ids
from geist_pool.broker.events import Tick, WorkerSaid
from geist_pool.broker.text_jobs import do_text_job
from geist_pool.broker.text_types import TextJob
from geist_pool.errors import BadRequest, Unsupported
from geist_pool.protocol import (
    Assign,
    Cancel,
    ContextCreate,
    ContextDrop,
    ContextGet,
    ContextLoad,
    ContextSave,
    ContextSaved,
    CreateWork,
    Done,
    ErrorBody,
    Failed,
    Generate,
    GenerateDone,
    LoadWork,
    Message,
    Publish,
    Sampling,
    SaveWork,
    Timings,
    Usage,
)


def entry_of(world, reference, space="default"):
    return world.machine.books.directory.find(space, reference)


def assigns(worker):
    return [m for m in worker.inbox if isinstance(m, Assign)]


# ---- samples


def test_samples_draw_from_streams_of_their_own(world):
    world.hello()
    world.ask(Generate(text="a", max_tokens=4, n=3, sampling=Sampling(seed=7, stream=5)), "n")
    world.run()
    got = world.result("n")
    assert len(got.samples) == 3 and len({s.tokens for s in got.samples}) > 1
    assert (got.tokens, got.text) == (got.samples[0].tokens, got.samples[0].text)
    for i, sample in enumerate(got.samples):
        world.ask(Generate(text="a", max_tokens=4, sampling=Sampling(seed=7, stream=5 + i)), f"one{i}")
        world.run()
        assert world.result(f"one{i}").tokens == sample.tokens and world.result(f"one{i}").samples == ()


def test_streams_of_samples_after_a_death_repeat_nothing(world):
    first = world.hello("w0")
    world.ask(Generate(text="a", max_tokens=4, n=2, stream=True), "g")
    first.read_all()
    for _ in range(5):
        first.step()
    first.die()
    world.hello("w1")
    world.run()
    got = world.result("g")
    for i, sample in enumerate(got.samples):
        chunks = [c for c in world.chunks("g") if c.sample == i]
        assert tuple(t for c in chunks for t in c.tokens) == sample.tokens and len(sample.tokens) == 4
        assert "".join(c.text for c in chunks) == sample.text


def test_a_worker_that_draws_too_few_samples_is_wrong(world):
    worker = world.hello()
    world.ask(Generate(text="a", max_tokens=1, n=2), "g")
    (assign,) = assigns(worker)
    worker.inbox.clear()
    world.handle(WorkerSaid("w0", Done(assign.job, 1, GenerateDone((1,), b"x", "length", None, None), Usage(), Timings())))
    assert world.error("g").code == "internal"


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (Generate(text="a", n=2, publish=Publish()), "publish"),
        (Generate(text="a", publish=Publish(name="a\0b")), "publish.name"),
        (Generate(text="a", n=2, sampling=Sampling(stream=(1 << 31) - 1)), "n"),
    ],
)
def test_refused(world, request_, path):
    world.ask(request_, "r")
    assert (world.error("r").code, world.error("r").path) == ("bad_request", path)


# ---- publish


def test_published_context_is_prompt_and_answer(world):
    worker = world.hello()
    world.ask(ContextCreate(text="x" * 100, name="root"), "c")
    world.run()
    world.ask(Generate(context="root", text="abc", max_tokens=40, publish=Publish(name="told", ttl_s=50, pin=True)), "g")
    (assign,) = assigns(worker)
    ceiling = assign.work.grant
    assert ceiling.ceiling and ceiling.ref.n_tokens == 143
    before = world.stats.store_bytes
    world.run()
    got = world.result("g")
    info, entry = got.published, entry_of(world, "told")
    assert unpack_ids(entry.tokens) == (*map(ord, "x" * 100 + "abc"), *got.tokens)
    assert (info.n_tokens, info.parent, info.name, info.pinned) == (143, world.result("c").context.id, "told", True)
    assert info.expires == world.now + 50 and got.publish_error is None
    assert world.stats.store_bytes == sum(n for n, _ in world.shm.values()) <= before
    world.ask(Generate(context="told", text="more", max_tokens=1), "on")
    world.run()
    assert world.result("on").usage == Usage(reused=143, prefilled=4, generated=1)


def test_an_answer_cut_short_gives_back_what_was_reserved(world):
    worker = world.hello()
    world.ask(Generate(text="abc", max_tokens=500, publish=Publish(name="p")), "g")
    reserved = world.stats.store_bytes_by_kind["reserved"]
    worker.read_all()
    worker.step()
    world.ask(Cancel(id="g"), "x")
    worker.read_all()
    got = world.result("g")
    assert got.finish_reason == "cancelled" and got.published.n_tokens == 4 == entry_of(world, "p").n_tokens
    assert got.published.bytes == world.stats.store_bytes < reserved and world.stats.store_bytes_by_kind["reserved"] == 0


def test_text_that_ends_inside_a_token_is_computed_anew(world):
    """No state of the generation is the context's: the ids of the text are made, and a worker takes them in."""
    worker = world.hello()
    worker.tears = True
    world.ask(Generate(text="abc", max_tokens=4, publish=Publish(name="p")), "g")
    world.run()
    got = world.result("g")
    assert len(got.tokens) == 4 and got.raw == bytes(got.tokens[:3])
    assert unpack_ids(entry_of(world, "p").tokens) == (*map(ord, "abc"), *got.tokens[:3])
    assert got.published.n_tokens == 6 and got.usage == Usage(prefilled=3 + 6, generated=4)
    assert got.attempts == 1 and world.stats.requests_active == 0


@pytest.mark.parametrize("end", ["death", "cancel", "failed", "deadline", "text", "full"])
def test_an_answer_is_not_lost_when_its_context_is(world_of, end):
    world = world_of(memory=60_000)
    worker = world.hello()
    worker.tears = True
    world.auto_text = False
    world.ask(Generate(text="abc", max_tokens=4, publish=Publish(name="p"), deadline_ms=5000), "g")
    world.finish_text()
    worker.read_all()
    for _ in range(4):
        worker.step()
    assert world.is_open("g") and world.texts[0].answer is not None
    if end == "text":
        world.ask(Cancel(id="g"), "x")
    elif end == "full":
        world.ask(ContextCreate(tokens=tuple(range(10)), pin=True), "big")
        world.ask(ContextCreate(tokens=tuple(range(20, 30)), pin=True), "big2")
        while len(world.texts) > 1:
            world.finish_text(1)
        world.run()
        world.finish_text(0)
    else:
        world.finish_text()
        (assign,) = assigns(worker)
        assert isinstance(assign.work, CreateWork) and not assign.work.grant.ceiling
        worker.read_all()
        if end == "death":
            worker.die()
            world.hello("w1").read_all()
            world.workers["w1"].die()
        elif end == "cancel":
            world.ask(Cancel(id="g"), "x")
            worker.read_all()
        elif end == "failed":
            worker.jobs.clear()
            world.handle(WorkerSaid("w0", Failed(assign.job, assign.attempt, ErrorBody("engine", "out of memory"))))
        else:
            world.now += 6
            world.handle(Tick())
            worker.read_all()
    got = world.result("g")
    assert len(got.tokens) == 4 and got.finish_reason == "length" and got.published is None and got.worker == "w0"
    codes = {
        "death": "worker_lost", "cancel": "cancelled", "failed": "engine", "deadline": "deadline", "text": "cancelled",
        "full": "store_full",
    }  # fmt: skip
    assert got.publish_error.code == codes[end]
    assert entry_of(world, "p") is None and world.stats.store_bytes_by_kind["reserved"] == 0


def test_no_room_to_keep_it_is_no_reason_not_to_answer(world_of):
    world = world_of(memory=60_000)
    worker = world.hello()
    world.ask(Generate(text="abc", max_tokens=900, publish=Publish(name="p")), "g")
    (assign,) = assigns(worker)
    assert assign.work.grant is None
    world.run()
    got = world.result("g")
    assert len(got.tokens) == 900 and got.published is None
    assert got.publish_error.code == "store_full" and got.publish_error.data["limit"] == 60_000


def test_publishing_what_exists_gives_that_and_binds_the_name(world):
    world.hello()
    world.ask(Generate(text="abc", max_tokens=3, publish=Publish(name="one")), "1")
    world.run()
    first = world.result("1")
    again = Generate(text="abc", max_tokens=3, publish=Publish(name="two"), sampling=Sampling(seed=first.seed))
    world.ask(again, "2")
    world.run()
    got = world.result("2")
    assert got.published.id == first.published.id and got.published.name == "two"
    assert len(world.machine.books.directory.sealed()) == 1 and world.stats.store_bytes == got.published.bytes


def test_a_death_while_publishing_is_tried_again_under_other_names(world):
    one = world.hello("w0")
    world.ask(Generate(text="abc" * 30, max_tokens=3, publish=Publish(name="p")), "g")
    one.read_all()
    first = one.jobs[next(iter(one.jobs))].assign.work.grant.ref
    world.shm[first.image] = (1, ())
    one.die()
    assert first.image in world.unlinked
    world.hello("w1")
    world.run()
    assert world.result("g").published.n_tokens == 93 and first.image not in world.shm


def test_a_worker_that_publishes_what_was_not_granted_is_not_believed(world):
    worker = world.hello()
    world.ask(Generate(text="abc", max_tokens=3, publish=Publish(name="p")), "g")
    (assign,) = assigns(worker)
    worker.inbox.clear()
    made = assign.work.grant.ref  # as if the answer had all three tokens; it has one
    done = GenerateDone((97,), b"a", "stop", None, None, published=made)
    world.handle(WorkerSaid("w0", Done(assign.job, 1, done, Usage(), Timings())))
    got = world.result("g")
    assert got.tokens == (97,) and got.publish_error.code == "internal" and world.stats.store_bytes == 0


def test_a_worker_that_could_not_publish_says_why(world):
    worker = world.hello()
    world.ask(Generate(text="abc", max_tokens=3, publish=Publish(name="p")), "g")
    (assign,) = assigns(worker)
    worker.inbox.clear()
    done = GenerateDone((97,), b"a", "stop", None, None, publish_error=ErrorBody("store_full", "no room in /dev/shm"))
    world.handle(WorkerSaid("w0", Done(assign.job, 1, done, Usage(), Timings())))
    got = world.result("g")
    assert got.tokens == (97,) and got.publish_error.code == "store_full" and world.stats.store_bytes == 0


def test_a_published_turn_can_be_continued_with_messages(world):
    worker = world.hello()
    world.ask(ContextCreate(messages=(Message("system", "be brief"),), name="m"), "1")
    world.run()
    world.ask(Generate(context="m", messages=(Message("user", "hi"),), max_tokens=5, publish=Publish(name="p")), "g")
    (assign,) = assigns(worker)
    assert assign.work.grant.envelope.messages[-1] == Message("assistant", "")
    world.run()
    said = world.result("g").text
    messages = (Message("system", "be brief"), Message("user", "hi"), Message("assistant", said))
    assert entry_of(world, "p").messages == messages
    world.auto_text = False
    world.ask(Generate(context="p", messages=(Message("user", "and?"),), max_tokens=1), "on")
    assert world.texts[0].context_messages == messages
    world.finish_text()
    world.run()
    assert world.result("on").usage.reused == world.result("g").published.n_tokens


def test_a_published_continuation_of_no_messages_has_none(world):
    world.hello()
    world.ask(ContextCreate(messages=(Message("system", "be brief"),), name="m"), "1")
    world.run()
    for rid, suffix in (("text", {"text": "hi"}), ("none", {})):
        world.ask(Generate(context="m", max_tokens=5, publish=Publish(name=rid), **suffix), rid)
        world.run()
        assert entry_of(world, rid).messages is None


class Spelling:
    """A tokenizer of few pieces; what is encoded are 100 and more."""

    def __init__(self):
        self.pieces = {1: b"abc", 2: b"de", 3: b"\xc3\xa9f", 9: b""}

    def is_control(self, token):
        return token == 9

    def piece(self, token):
        return self.pieces[token]

    def encode(self, text, *, special):
        assert not special
        return [100 + b for b in text.encode()]


@pytest.mark.parametrize(
    ("data", "ids"),
    [
        (b"abcde", (1, 2)),
        (b"abcd", (1, 100 + ord("d"))),
        (b"ab", (100 + ord("a"), 100 + ord("b"))),
        (b"", ()),
        (b"abcde\xc3\xa9", (1, 2, 100 + 0xC3, 100 + 0xA9)),
    ],
)
def test_ids_of_a_text_that_ends_inside_a_token(data, ids):
    done = do_text_job(TextJob(key="j", answer=(1, 2, 3), answer_data=data), Spelling(), None)
    assert done.tokens == ids


def test_text_that_ends_inside_a_character_has_no_ids():
    with pytest.raises(Unsupported) as caught:
        do_text_job(TextJob(key="j", answer=(1, 2, 3), answer_data=b"abcde\xc3"), Spelling(), None)
    assert caught.value.path == "publish"


# ---- files


def test_save_and_load(world):
    worker = world.hello()
    world.ask(ContextCreate(messages=(Message("user", "x" * 100),), name="../tale", pin=True), "c")
    world.run()
    world.ask(ContextSave(context="../tale"), "s")
    (assign,) = assigns(worker)
    assert isinstance(assign.work, SaveWork) and assign.work.path == "/saved/default/%2E%2E%2Ftale.geist"
    assert world.directories == ["/saved/default"]
    assert (assign.work.envelope.first_block, assign.work.envelope.n_blocks, assign.work.envelope.parent) == (0, 1, None)
    world.run()
    info = world.result("s").info
    assert (info.saved, info.space, info.n_tokens, info.fingerprint) == ("../tale", "default", 106, "ab" * 32)
    world.ask(ContextDrop(context="../tale"), "d")
    world.ask(ContextSaved(), "list")
    assert [i.saved for i in world.result("list").contexts] == ["../tale"]
    world.run()
    assert not world.shm
    world.ask(ContextLoad(saved="../tale"), "l")
    (assign,) = assigns(worker)
    assert isinstance(assign.work, LoadWork) and not assign.work.grant.ceiling
    world.run()
    back = world.result("l")
    assert back.created and back.context.name == "../tale" and back.context.n_tokens == 106
    assert back.context.id != world.result("c").context.id and not back.context.pinned
    assert entry_of(world, "../tale").messages == (Message("user", "x" * 100),)
    world.ask(ContextLoad(saved="../tale", name="other", ttl_s=9), "again")
    world.run()
    again = world.result("again")
    assert not again.created and again.context.id == back.context.id
    assert entry_of(world, "other") is entry_of(world, "../tale")
    assert world.stats.store_bytes == back.context.bytes


def test_a_context_on_another_is_saved_whole(world):
    worker = world.hello()
    world.ask(ContextCreate(text="x" * 70, name="root"), "1")
    world.run()
    world.ask(ContextCreate(on="root", text="y" * 70, name="leaf"), "2")
    world.run()
    world.ask(ContextSave(context="leaf", saved="kept"), "s")
    (assign,) = assigns(worker)
    envelope = assign.work.envelope
    assert len(assign.chain) == 2 and envelope.chain == () and (envelope.first_block, envelope.n_blocks) == (0, 2)
    world.run()
    assert world.result("s").info.saved == "kept" and world.result("s").info.n_tokens == 140


@pytest.mark.parametrize("name", ["a", "..", "a/b", "/etc/passwd", "a%2Fb", "\u00e9t\u00e9", ".hidden", "x" * 128, "a b\n"])
def test_names_of_files(name):
    path = saved.file_of("/root", "sp/ace", name)
    directory, _, stem = path.removeprefix("/root/").partition("/")
    assert directory == "sp%2Face" and "/" not in stem and not stem.startswith(".")
    assert saved.decode(stem.removesuffix(".geist")) == name


def test_names_too_long_for_a_file_are_refused(world):
    world.hello()
    world.ask(ContextCreate(text="a", name="n"), "c")
    world.run()
    for rid, request in {
        "save": ContextSave(context="n", saved="\u00e9" * 60),
        "load": ContextLoad(saved="/" * 100),
    }.items():
        world.ask(request, rid)
        assert (world.error(rid).code, world.error(rid).path) == ("bad_request", "saved")


@pytest.mark.parametrize("stem", ["a%2e", "%", "a b", "%FF", "%61", "", "a.b"])
def test_files_that_nobody_saved_have_no_name(stem):
    assert saved.decode(stem) is None


def test_refusals_of_files(world_of):
    world = world_of()
    world.hello()
    world.ask(ContextLoad(saved="nothing"), "none")
    assert (world.error("none").code, world.error("none").path) == ("unknown_context", "saved")
    world.ask(ContextSave(context="nobody"), "save")
    assert world.error("save").code == "unknown_context"
    world.ask(ContextCreate(text="abc", name="n"), "c")
    world.run()
    world.ask(ContextSave(context="n"), "s")
    world.run()
    world.ask(ContextLoad(saved="n", space="other"), "space")
    assert world.error("space").code == "unknown_context"
    world.file_fingerprint = "cd" * 32
    world.ask(ContextLoad(saved="n"), "model")
    assert world.error("model").code == "image_mismatch"
    world = world_of(saved_dir="")
    for rid, request in {"a": ContextSave(context="n"), "b": ContextLoad(saved="n"), "c": ContextSaved()}.items():
        world.ask(request, rid)
        assert world.error(rid).code == "unsupported"


def test_a_load_that_does_not_fit_is_refused_before_the_work(world_of):
    world = world_of(memory=60_000)
    worker = world.hello()
    world.ask(ContextCreate(text="a" * 10, name="n"), "c")
    world.run()
    world.ask(ContextSave(context="n"), "s")
    world.run()
    (path,) = world.files
    world.files[path] = (world.files[path][0], tuple(range(900)))
    world.ask(ContextLoad(saved="n"), "l")
    assert world.error("l").code == "store_full" and not assigns(worker)
    world.files[path] = (world.files[path][0], tuple(range(1001)))
    world.ask(ContextLoad(saved="n"), "long")
    assert world.error("long").code == "too_long" and world.error("long").data == {"tokens": 1001, "limit": 1000}


def test_cancel_while_a_file_is_looked_at(world):
    world.hello()
    world.auto_text = False
    world.ask(ContextLoad(saved="n"), "l")
    world.ask(ContextSaved(), "list")
    for rid in ("l", "list"):
        world.ask(Cancel(id=rid), f"x{rid}")
        assert world.error(rid).code == "cancelled"
    while world.looks:
        world.look()
    assert world.stats.requests_active == 0


def test_a_file_named_by_nobody_is_never_reached():
    for name in ("..", "../../x", "/abs", "a/../../b"):
        assert saved.file_of("/root", name, name).count("/") == 3
    with pytest.raises(BadRequest):
        saved.file_of("/root", "s", "%" * 100)


def test_get_after_load_is_the_same_context(world):
    world.hello()
    world.ask(ContextCreate(text="abc", name="n"), "c")
    world.run()
    world.ask(ContextSave(context="n"), "s")
    world.run()
    world.ask(ContextLoad(saved="n"), "l")
    world.run()
    world.ask(ContextGet(context="n"), "g")
    assert world.result("g").context.id == world.result("c").context.id and not world.result("l").created

"""Property: what a context is called, how long it is kept and whether it is pinned survive the broker, also where they were said
after the context was made; messages continue a context whose tokens they render, whoever made it. Tolerance: what was said within
the last quarter of a second. Reason: a name that leads to an older context after a crash is another conversation.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from geist_pool.broker.events import Adopted, Stop, Tick, WorkerSaid
from geist_pool.errors import ImageDamaged
from geist_pool.protocol import (
    ContextCreate,
    ContextDrop,
    ContextGet,
    ContextList,
    ContextLoad,
    ContextSave,
    Generate,
    Mapped,
    Message,
    Publish,
    Sampling,
    error_body,
)


def make(world, text: str, rid: str, **fields) -> str:
    world.ask(ContextCreate(text=text, **fields), rid)
    world.run()
    return world.result(rid).context.id


def crash(world_of, old, *, written: bool = True):
    """A new broker, with what the old one left."""
    if written:
        old.now += 0.3
        old.handle(Tick())
    new = world_of(adopt=old.scan())
    new.shm, new.sealed, new.known, new.now = old.shm, old.sealed, old.known, old.now + 1
    new.hello()
    return new


def named(world, rid: str = "list") -> dict[str, tuple[str, ...]]:
    world.ask(ContextList(), rid)
    return {c.id: c.names for c in world.result(rid).contexts}


def test_a_name_bound_again_stays_with_the_newer_binding(world_of, world):
    world.hello()
    old = make(world, "older", "1")
    young = make(world, "younger", "2", name="n")
    make(world, "older", "3", name="n")  # exists; the name moves to the older context
    assert named(world) == {old: ("n",), young: ()}
    assert named(crash(world_of, world)) == {old: ("n",), young: ()}


def test_names_pins_and_ends_said_later(world_of, world):
    world.hello()
    first = make(world, "a", "1", name="one", ttl_s=10)
    make(world, "a", "2", name="two", pin=True)
    new = crash(world_of, world)
    assert named(new) == {first: ("one", "two")}
    new.ask(ContextGet(context="two"), "get")
    info = new.result("get").context
    assert info.pinned and info.expires is None and info.name == "two"
    new.now += 20
    new.handle(Tick())
    assert first in named(new, "later")


def test_what_was_sealed_after_the_last_writing_has_its_own_name(world_of, world):
    world.hello()
    old = make(world, "older", "1", name="n")
    world.now += 0.3
    world.handle(Tick())
    assert world.bindings is not None
    young = make(world, "younger", "2", name="n")
    assert named(crash(world_of, world, written=False)) == {old: (), young: ("n",)}


def test_without_bindings_envelopes_speak_and_the_newest_wins(world_of, world):
    world.hello()
    old = make(world, "older", "1", name="n")
    world.now += 1
    young = make(world, "younger", "2", name="n")
    world.bindings = None
    assert named(crash(world_of, world, written=False)) == {old: (), young: ("n",)}


def test_dropped_while_it_was_held_does_not_come_back(world_of, world):
    worker = world.hello()
    make(world, "abc", "1", name="n")
    world.ask(Generate(context="n", max_tokens=5), "g")
    worker.read_all()
    world.ask(ContextDrop(context="n"), "d")
    assert world.result("d") and world.shm, "its image is there until the request ends"
    new = crash(world_of, world)
    assert named(new) == {}
    new.run()
    assert not new.shm


def test_nothing_is_written_while_nothing_changes_and_not_too_often(world):
    world.hello()
    for i in range(5):
        make(world, "a" * (i + 1), str(i), name=f"n{i}")
        world.now += 0.01
        world.handle(Tick())
        if i == 0:
            first = world.bindings
    assert world.bindings is first is not None and len(first.contexts) == 1
    world.now += 0.3
    world.handle(Tick())
    assert len(world.bindings.contexts) == 5
    world.bindings = None
    make(world, "nameless", "x")
    world.now += 0.3
    world.handle(Tick())
    assert world.bindings is None


def test_stop_that_keeps_contexts_writes_at_once(world_of):
    world = world_of(keep_contexts=True)
    world.hello()
    made = make(world, "a", "1", name="n")
    world.handle(Stop())
    assert [(b.context, b.names) for b in world.bindings.contexts] == [(made, ("n",))]


def test_adoption_of_nothing(world_of):
    world = world_of(adopt=Adopted((), ()))
    world.hello()
    assert named(world) == {}


# ---- messages of a context that was made from text

SAID = (Message("user", "hi"),)


def continue_by_messages(world, reference: str, rid: str) -> tuple[Message, ...] | None:
    """The messages that the text work of a continuation is given."""
    world.auto_text = False
    world.ask(Generate(context=reference, messages=(Message("user", "more"),), max_tokens=1), rid)
    job = world.texts[-1]
    world.finish_text()
    world.auto_text = True
    world.run()
    return job.context_messages


def test_messages_continue_what_was_made_from_their_text(world):
    world.hello()
    made = make(world, "user:hi;", "1", name="t")
    assert continue_by_messages(world, "t", "g0") is None
    world.ask(ContextCreate(messages=SAID), "2")
    assert world.result("2").created is False and world.result("2").context.id == made
    assert continue_by_messages(world, "t", "g") == SAID
    world.ask(ContextSave(context="t"), "s")
    world.run()
    (envelope, _) = world.files["/saved/default/t.geist"]
    assert envelope.messages == SAID


def test_messages_that_joined_a_create_from_text(world):
    world.hello()
    world.ask(ContextCreate(text="user:hi;", name="t"), "1")
    world.ask(ContextCreate(messages=SAID), "2")
    world.run()
    assert world.result("1").context.id == world.result("2").context.id
    assert continue_by_messages(world, "t", "g") == SAID


# ---- names that would be ids, numbers that are none in single precision


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (ContextCreate(text="a", name="0123456789ab"), "name"),
        (Generate(text="a", publish=Publish(name="0123456789ab")), "publish.name"),
        (ContextLoad(saved="s", name="0123456789ab"), "name"),
    ],
)
def test_a_name_cannot_be_an_id(world, request_, path):
    world.hello()
    world.ask(request_)
    assert (world.error().code, world.error().path) == ("bad_request", path)


def test_nor_can_one_that_a_file_brings(world):
    world.hello()
    make(world, "a", "1")
    world.ask(ContextSave(context=world.result("1").context.id, saved="s"), "2")
    world.run()
    path = "/saved/default/s.geist"
    envelope, tokens = world.files[path]
    world.files[path] = (replace(envelope, name="0123456789ab"), tokens)
    world.ask(ContextLoad(saved="s"), "3")
    assert (world.error("3").code, world.error("3").path) == ("bad_request", "saved")
    world.ask(ContextLoad(saved="s", name="other"), "4")
    world.run()
    assert "other" in world.result("4").context.names


@pytest.mark.parametrize("bad", [{"top_p": 1e-320}, {"min_p": 0.99999999999}, {"repeat_penalty": 1e-60}])
def test_numbers_that_single_precision_does_not_have(world, bad):
    world.hello()
    world.ask(Generate(text="a", sampling=Sampling(**bad)))
    (name,) = bad
    assert (world.error().code, world.error().path) == ("bad_request", f"sampling.{name}")


def test_smallest_numbers_that_it_has(world):
    world.hello()
    world.ask(Generate(text="a", max_tokens=1, sampling=Sampling(top_p=1e-45, min_p=0.9999999, repeat_penalty=1e-45)))
    world.run()
    assert world.result().tokens


def test_all_names_are_told(world):
    world.hello()
    made = make(world, "a", "1", name="x")
    make(world, "a", "2", name="y")
    assert named(world) == {made: ("x", "y")}


def test_no_words_about_a_context_that_was_dropped_before_it_was_mapped(world):
    world.hello()
    made = make(world, "a", "1", name="x")
    world.log.clear()
    world.ask(ContextDrop(context="x"), "d")
    world.handle(WorkerSaid("w0", Mapped(made, error_body(ImageDamaged("there is none")))))
    assert not [entry for entry in world.log if entry.event == "not_mapped"]

"""Property: the directory counts every byte until nobody can use it any more, finds the longest whole prefix within a space, and
lets go in the right order. Tolerance: none. Reason: a byte forgotten is memory that kills the host later, an object unlinked too
early is a lost context, a wrong prefix is another conversation.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geist_pool.broker import bindings
from geist_pool.broker.content import ContentIndex, common_ids, pack_ids, unpack_ids
from geist_pool.broker.directory import Directory
from geist_pool.broker.events import AdoptedContext, SendWorker, Unlink
from geist_pool.errors import StoreFull
from geist_pool.protocol import Envelope, Forget, Geometry, Mismatch
from geist_pool.store import layout

GEOMETRY = Geometry(header_bytes=4096, n_vocab=256, recurrent_bytes=8192, kv_bytes_per_token=64, kv_block_bytes=4096)
IMAGE = 4096 + layout.image_bytes(GEOMETRY, 10)  # of a context of a few tokens


class Shelf:
    """A directory and what it asked for."""

    def __init__(self, limit=1 << 20, quotas=None):
        self.asked = []
        self.directory = Directory("test", limit, self.asked.append, quotas)
        self.n = 0
        self.now = 0.0

    def envelope(self, tokens, **fields):
        self.n += 1
        base = {
            "id": f"{self.n:012x}", "name": None, "space": "s", "parent": None, "created": self.now, "ttl_s": None,
            "pin": False, "n_tokens": len(tokens), "first_block": 0, "n_blocks": 0,
        }  # fmt: skip
        return Envelope(**(base | fields))

    def make(self, tokens, base=None, **fields):
        """A sealed context of these ids; None if there is no room yet."""
        self.now += 1
        grant = self.directory.plan(self.envelope(tokens, **fields), base, GEOMETRY)
        if not self.directory.make_room(grant.ref.image_bytes + grant.ref.kv_bytes, grant.envelope.space):
            return None
        entry = self.directory.grant(grant, pack_ids(tokens), base)
        self.directory.validate()
        self.directory.seal(entry, self.now)
        self.directory.validate()
        return entry

    def taken(self):
        """What was asked for since the last look: names to unlink, (worker, context) to forget."""
        names = [name for a in self.asked if isinstance(a, Unlink) for name in a.names]
        forgets = [(a.worker, a.message.context) for a in self.asked if isinstance(a, SendWorker)]
        assert all(isinstance(a.message, Forget) for a in self.asked if isinstance(a, SendWorker))
        self.asked.clear()
        self.directory.validate()
        return names, forgets


# ---- content


@given(st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=20), st.lists(st.integers(0, 3), max_size=10))
def test_index_against_brute_force(contexts, prompt):
    contexts = sorted({tuple(c) for c in contexts if c})
    index = ContentIndex()
    for n, tokens in enumerate(contexts):
        index.add(pack_ids(tokens), str(n))
    for tokens in contexts[::2]:  # some go again
        index.remove(pack_ids(tokens))
        assert index.exact(pack_ids(tokens)) is None
    left = {tokens: str(n) for n, tokens in enumerate(contexts) if n % 2}
    prefixes = [t for t in left if tuple(prompt[: len(t)]) == t]
    assert index.longest_prefix(pack_ids(prompt)) == (left[max(prefixes, key=len)] if prefixes else None)
    nearest = index.nearest(pack_ids(prompt))
    common = [
        next((i for i, (a, b) in enumerate(zip(t, prompt, strict=False)) if a != b), min(len(t), len(prompt))) for t in left
    ]
    assert (nearest is None) == (not left)
    if nearest is not None:
        tokens = next(t for t, key in left.items() if key == nearest[0])
        assert nearest[1] == max(common) == common_ids(pack_ids(tokens), pack_ids(prompt))


def test_ids_survive_packing():
    ids = (0, 1, 255, 256, 248_319, (1 << 31) - 1)
    assert unpack_ids(pack_ids(ids)) == ids


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 700])
def test_findings_row_7_exact_to_the_token(n):
    """FINDINGS row 7 (directory's part): prefixes of any length are found whole, blocks play no part."""
    shelf = Shelf()
    entry = shelf.make(tuple(range(n)))
    for more in (0, 1, 64):
        found, mismatch = shelf.directory.longest_prefix("s", pack_ids((*range(n), *[9999] * more)))
        assert found is entry and mismatch is None
    found, mismatch = shelf.directory.longest_prefix("s", pack_ids(range(n - 1)))
    assert found is None
    assert mismatch == Mismatch(context=entry.id, position=n - 1)
    assert shelf.directory.longest_prefix("another space", pack_ids(range(n))) == (None, None)


# ---- sizes


def test_sizes_are_the_stores():
    shelf = Shelf()
    root = shelf.make(tuple(range(130)))
    assert root.kv.n_bytes == 2 * 4096 and root.envelope.n_blocks == 2
    leaf = shelf.make(tuple(range(200)), base=root)
    assert (leaf.envelope.first_block, leaf.envelope.n_blocks, leaf.envelope.parent) == (2, 1, root.id)
    assert leaf.image.n_bytes == layout.image_object_bytes(GEOMETRY, 200, leaf.envelope)
    assert [r.id for r in shelf.directory.chain(leaf)] == [root.id, leaf.id]
    small = shelf.make((1, 2, 3))
    assert small.kv is None and small.ref().kv is None and small.ref().kv_bytes == 0
    assert shelf.directory.used == sum(e.own_bytes for e in (root, leaf, small))


# ---- going


def test_parent_with_children_keeps_its_blocks_until_the_last_child_goes():
    shelf = Shelf()
    root = shelf.make(tuple(range(130)))
    one = shelf.make(tuple(range(200)), base=root)
    two = shelf.make((*range(130), 7), base=root)
    shelf.directory.drop(root, "dropped")
    assert shelf.taken() == ([root.image.name], [])
    assert shelf.directory.orphaned_bytes() == root.kv.n_bytes
    assert shelf.directory.find("s", root.id) is None
    assert shelf.directory.longest_prefix("s", pack_ids(range(150)))[0] is None
    assert [r.id for r in shelf.directory.chain(one)] == [root.id, one.id]
    shelf.directory.drop(one, "dropped")
    assert shelf.taken() == ([one.image.name, one.kv.name], [])
    shelf.directory.drop(two, "dropped")
    assert shelf.taken() == ([two.image.name, root.kv.name], [])
    assert shelf.directory.used == 0 and root.id not in shelf.directory


def test_parent_without_blocks_of_its_own_still_holds_its_parent():
    shelf = Shelf()
    root = shelf.make(tuple(range(100)))
    middle = shelf.make(tuple(range(120)), base=root)  # no whole block of its own
    leaf = shelf.make(tuple(range(130)), base=middle)
    assert middle.kv is None
    shelf.directory.drop(root, "dropped")
    shelf.directory.drop(middle, "dropped")
    names, _ = shelf.taken()
    assert names == [root.image.name, middle.image.name]
    shelf.directory.drop(leaf, "dropped")
    names, _ = shelf.taken()
    assert names == [leaf.image.name, leaf.kv.name, root.kv.name] and shelf.directory.used == 0


def test_bytes_count_until_unmapped_everywhere():
    shelf = Shelf()
    entry = shelf.make(tuple(range(70)))
    for worker in ("w0", "w1", "w2"):
        shelf.directory.mention(worker, entry)
    shelf.directory.drop(entry, "dropped")
    names, forgets = shelf.taken()
    assert names == [entry.image.name, entry.kv.name]
    assert forgets == [("w0", entry.id), ("w1", entry.id), ("w2", entry.id)]
    assert shelf.directory.used == shelf.directory.unmapping_bytes() == entry.own_bytes
    assert shelf.directory.forgotten("w0", entry.id) and shelf.directory.forgotten("w1", entry.id)
    assert shelf.directory.used == entry.own_bytes
    shelf.directory.worker_lost("w2")
    assert shelf.directory.used == 0
    assert not shelf.directory.forgotten("w0", entry.id)  # an answer to nothing


def test_told_again_after_the_question_is_asked_again():
    """A Forget is under way when the worker is told of a child, which maps the parent's blocks once more."""
    shelf = Shelf()
    root = shelf.make(tuple(range(70)))
    leaf = shelf.make(tuple(range(140)), base=root)
    shelf.directory.mention("w0", root)
    shelf.directory.drop(root, "dropped")
    assert shelf.taken()[1] == [("w0", root.id)]
    shelf.directory.mention("w0", leaf)
    shelf.directory.drop(leaf, "dropped")
    assert shelf.taken()[1] == [("w0", leaf.id)]  # the question about root is not answered yet
    shelf.directory.forgotten("w0", root.id)
    assert shelf.taken()[1] == [("w0", root.id)]
    assert shelf.directory.used == root.kv.n_bytes + leaf.own_bytes
    shelf.directory.forgotten("w0", root.id)
    shelf.directory.forgotten("w0", leaf.id)
    assert shelf.directory.used == 0


def test_lease_keeps_a_dropped_context():
    shelf = Shelf()
    entry = shelf.make((1, 2))
    shelf.directory.lease(entry, "job", 5.0)
    shelf.directory.drop(entry, "dropped")
    assert shelf.taken() == ([], [])
    shelf.directory.release(entry, "job")
    assert shelf.taken()[0] == [entry.image.name] and shelf.directory.used == 0


# ---- room


def test_oldest_goes_first_and_only_as_much_as_needed():
    shelf = Shelf(limit=3 * IMAGE)
    entries = [shelf.make((n, n)) for n in range(3)]
    shelf.directory.lease(entries[0], "j", 100.0)
    shelf.directory.release(entries[0], "j")  # used last
    assert shelf.make((7, 7)) is not None
    assert shelf.taken()[0] == [entries[1].image.name]


def test_pinned_and_leased_stay():
    shelf = Shelf(limit=3 * IMAGE)
    pinned = shelf.make((1, 1), pin=True)
    leased = shelf.make((2, 2))
    shelf.directory.lease(leased, "j", 1.0)
    shelf.make((3, 3))
    assert shelf.make((4, 4)) is not None
    shelf.directory.lease(shelf.directory.exact("s", pack_ids((4, 4))), "k", 2.0)
    shelf.taken()
    with pytest.raises(StoreFull) as caught:
        shelf.make((5, 5))
    assert caught.value.data == {"needed": IMAGE, "limit": 3 * IMAGE, "used": 3 * IMAGE, "held": 3 * IMAGE}
    assert shelf.taken() == ([], []) and pinned.state == leased.state == "sealed"


def test_findings_row_17_nothing_is_evicted_for_what_cannot_fit():
    """FINDINGS row 17: above the limit is refused, and no context is lost by the attempt."""
    shelf = Shelf(limit=2 * IMAGE)
    shelf.make((1, 1))
    shelf.make((2, 2), pin=True)
    for n in (64 * 9, 64):  # above the limit; below it, but beside the pinned one there is no room
        with pytest.raises(StoreFull):
            shelf.make(tuple(range(n)))
    assert shelf.taken() == ([], []) and shelf.directory.evictions == 0


def test_room_comes_when_workers_have_unmapped():
    shelf = Shelf(limit=2 * IMAGE)
    entries = [shelf.make((n, n)) for n in range(2)]
    for entry in entries:
        shelf.directory.mention("w0", entry)
    assert shelf.make((7, 7)) is None
    assert shelf.directory.evictions == 1
    assert shelf.make((7, 7)) is None
    assert shelf.directory.evictions == 1, "what is on its way is not evicted for again"
    shelf.directory.forgotten("w0", entries[0].id)
    assert shelf.make((7, 7)) is not None


def test_evicting_a_chain_counts_the_blocks_of_parents():
    shelf = Shelf(limit=IMAGE + 12 * 4096)  # the big one alone; it fits only if the orphaned blocks go as well
    root = shelf.make(tuple(range(64)))
    leaf = shelf.make(tuple(range(128)), base=root)
    big = shelf.make(tuple(range(1000, 1000 + 64 * 12)))
    assert root.state == leaf.state == "gone" and big.state == "sealed"
    assert shelf.directory.used == big.own_bytes


# ---- names, ttl, adoption


def test_names():
    shelf = Shelf()
    one, two = shelf.make((1,)), shelf.make((2,))
    shelf.directory.bind("n", one)
    shelf.directory.bind("m", one)
    shelf.directory.bind("n", two)
    assert shelf.directory.find("s", "n") is two and shelf.directory.find("s", "m") is one
    assert one.info().name == "m" and shelf.directory.find("t", "n") is None
    shelf.directory.drop(two, "dropped")
    assert shelf.directory.find("s", "n") is None


def test_a_name_never_hides_an_id():
    shelf = Shelf()
    one, two = shelf.make((1,)), shelf.make((2,))
    shelf.directory.bind(one.id, two)
    assert shelf.directory.find("s", one.id) is one


def test_expiry():
    shelf = Shelf()
    entry = shelf.make((1,), ttl_s=10)
    forever = shelf.make((2,), ttl_s=10)
    shelf.directory.keep(forever, pin=False, expires=None, now=5.0)
    assert shelf.directory.expire(10.9) == []
    assert shelf.directory.expire(11.0) == [entry]
    assert forever.state == "sealed"


def found(shelf, entry):
    return AdoptedContext(entry.envelope, entry.ref(), unpack_ids(entry.tokens))


def test_adoption_brings_back_what_there_was():
    before = Shelf()
    root = before.make(tuple(range(70)), name="old name", pin=True)
    leaf = before.make(tuple(range(140)), base=root, name="n")
    after = Shelf()
    taken = [after.directory.adopt(found(before, entry)) for entry in (root, leaf)]
    bindings.restore(after.directory, taken, None)
    after.directory.validate()
    assert after.directory.used == before.directory.used
    again = after.directory.find("s", "n")
    assert again.ref() == leaf.ref() and again.parent.pinned
    assert after.directory.chain(again) == before.directory.chain(leaf)


def test_adoption_refuses_doubles():
    before = Shelf()
    root = before.make(tuple(range(70)))
    after = Shelf()
    assert after.directory.adopt(found(before, root)) is not None
    assert after.directory.adopt(found(before, root)) is None
    other = Shelf()
    other.n = 100
    twin = other.make(tuple(range(70)))  # another id, the same tokens
    assert after.directory.adopt(found(other, twin)) is None
    after.directory.validate()


def test_adoption_takes_in_the_blocks_of_ancestors_that_are_gone():
    """A chain of three whose first two images were evicted before the crash: the last one comes back whole, the blocks below it
    count, are orphaned, and go with the last one that stands on them."""
    before = Shelf()
    root = before.make(tuple(range(70)))
    middle = before.make(tuple(range(140)), base=root)
    leaf = before.make(tuple(range(210)), base=middle)
    other = before.make((*range(140), 7), base=middle)
    after = Shelf()
    for entry in (leaf, other):
        assert after.directory.adopt(found(before, entry)) is not None
        after.directory.validate()
    assert after.directory.orphaned_bytes() == root.kv.n_bytes + middle.kv.n_bytes
    assert after.directory.used == leaf.own_bytes + other.own_bytes + after.directory.orphaned_bytes()
    again = after.directory.find("s", leaf.id)
    assert after.directory.chain(again) == before.directory.chain(leaf)
    assert after.directory.find("s", root.id) is None and after.directory.longest_prefix("s", pack_ids(range(100)))[0] is None
    after.directory.drop(again, "dropped")
    assert root.kv.name not in after.taken()[0]
    after.directory.drop(after.directory.find("s", other.id), "dropped")
    assert set(after.taken()[0]) >= {root.kv.name, middle.kv.name} and after.directory.used == 0


def test_a_grant_names_every_ancestor():
    shelf = Shelf()
    root = shelf.make(tuple(range(70)))
    leaf = shelf.make(tuple(range(140)), base=root)
    grant = shelf.directory.plan(shelf.envelope(range(210)), leaf, GEOMETRY)
    assert grant.envelope.chain == (root.ref(), leaf.ref()) and grant.envelope.parent == leaf.id


def test_adoption_of_more_than_the_limit():
    before = Shelf()
    entries = [before.make((n, n)) for n in range(5)]
    after = Shelf(limit=3 * IMAGE)
    for entry in entries:
        after.directory.adopt(found(before, entry))
    assert after.directory.fit() == 2
    assert after.taken()[0] == [e.image.name for e in entries[:2]]


# ---- limits of spaces


class Quota:
    def __init__(self, memory=0, queue=0, contexts=0):
        self.memory, self.queue, self.contexts = memory, queue, contexts


def test_a_space_over_its_limit_evicts_its_own():
    shelf = Shelf(quotas={"small": Quota(memory=2 * IMAGE)})
    others = [shelf.make((n, n)) for n in range(3)]
    mine = [shelf.make((n, n), space="small") for n in range(2)]
    assert shelf.make((7, 7), space="small") is not None
    assert shelf.taken()[0] == [mine[0].image.name] and all(e.state == "sealed" for e in others)
    with pytest.raises(StoreFull) as caught:
        shelf.make(tuple(range(64 * 9)), space="small")
    assert caught.value.data["space"] == "small" and caught.value.data["limit"] == 2 * IMAGE
    assert shelf.taken()[0] == []


def test_what_a_space_still_has_mapped_counts_against_its_limit():
    shelf = Shelf(quotas={"small": Quota(memory=2 * IMAGE)})
    mine = [shelf.make((n, n), space="small") for n in range(2)]
    shelf.directory.mention("w0", mine[0])
    assert shelf.make((7, 7), space="small") is None
    shelf.directory.forgotten("w0", mine[0].id)
    assert shelf.make((7, 7), space="small") is not None


def test_a_space_with_too_many_contexts():
    shelf = Shelf(quotas={"small": Quota(contexts=2)})
    mine = [shelf.make((n, n), space="small", pin=n == 1) for n in range(2)]
    assert shelf.make((7, 7), space="small") is not None
    assert shelf.taken()[0] == [mine[0].image.name]
    shelf.directory.lease(shelf.directory.exact("small", pack_ids((7, 7))), "j", 1.0)
    with pytest.raises(StoreFull) as caught:
        shelf.make((8, 8), space="small")
    assert caught.value.data == {"contexts": 2, "limit": 2, "space": "small"}
    assert shelf.make((8, 8)) is not None  # another space


def test_bytes_by_kind_add_up():
    shelf = Shelf()
    root = shelf.make(tuple(range(70)))
    leaf = shelf.make(tuple(range(140)), base=root)
    shelf.directory.mention("w0", root)
    grant = shelf.directory.plan(shelf.envelope(range(9)), None, GEOMETRY)
    shelf.directory.grant(grant, pack_ids(range(9)), None)
    shelf.directory.drop(root, "dropped")
    assert shelf.directory.bytes_by_kind() == {
        "image": leaf.image.n_bytes, "kv": leaf.kv.n_bytes, "orphaned": root.kv.n_bytes, "unmapping": root.image.n_bytes,
        "reserved": grant.ref.image_bytes,
    }  # fmt: skip
    assert sum(shelf.directory.bytes_by_kind().values()) == shelf.directory.used


@pytest.mark.parametrize("n_prompt", [1, 60, 64, 100])
def test_a_ceiling_is_above_every_length_and_comes_down_to_the_true_one(n_prompt):
    from geist_pool.broker.entries import More
    from geist_pool.protocol import Message

    messages = (Message("user", "x"), Message("assistant", ""))
    for n_answer in range(131):
        shelf = Shelf()
        root = shelf.make(tuple(range(n_prompt)), name="root")
        more = More(tokens=130, text_bytes=3 * 130)
        envelope = shelf.envelope(range(n_prompt), messages=messages)
        grant = shelf.directory.plan(envelope, root, GEOMETRY, more=more)
        entry = shelf.directory.grant(grant, pack_ids(range(n_prompt)), root, more)
        cut = layout.cut_to(grant, n_prompt + n_answer, GEOMETRY, "\ufffd" * n_answer)
        exact, true = cut.ref, cut.envelope
        assert exact == shelf.directory.plan(true, root, GEOMETRY).ref
        assert exact.image_bytes <= grant.ref.image_bytes and exact.kv_bytes <= grant.ref.kv_bytes
        shelf.directory.measure(entry, exact, true, pack_ids(range(n_prompt + n_answer)))
        shelf.directory.validate()
        assert shelf.directory.used == root.own_bytes + exact.image_bytes + exact.kv_bytes

"""Names and envelopes of stored contexts.

Property: names round-trip, are at most 30 characters, and only their exact form is taken. Sizes are those of the formula in
geist.h. An envelope comes back equal; any flipped bit, any cut, and the state "writing" are refused as ImageDamaged.
Tolerance: none, all are equalities. Reason: these bytes are all that is left of a context after a crash, and what they name is
unlinked or adopted by them.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geist_pool.errors import ImageDamaged, Internal
from geist_pool.protocol import ContextRef, Envelope, Geometry, Grant, Message
from geist_pool.store import layout, names

GEOMETRY = Geometry(header_bytes=4096, n_vocab=1000, recurrent_bytes=5000, kv_bytes_per_token=96, kv_block_bytes=8192)
FINGERPRINT = "ab" * 32
IDS = st.text("0123456789abcdef", min_size=12, max_size=12)


def envelope(**changes: object) -> Envelope:
    base = Envelope(
        id="00112233aabb",
        name="innkeeper",
        space="default",
        parent=None,
        created=1.5,
        ttl_s=60,
        pin=True,
        n_tokens=130,
        first_block=0,
        n_blocks=2,
        messages=(Message("system", "Du bist Wirtin. Grüße!"),),
        template_args={"enable_thinking": False},
    )
    return msgspec.structs.replace(base, **changes)


def sealed(value: Envelope, image: int = 8192) -> bytearray:
    front = bytearray(layout.pack(value, pool=names.pool_digest("p"), fingerprint=FINGERPRINT, numerics=7, image=image))
    front[layout.STATE_OFFSET : layout.STATE_OFFSET + 4] = layout.state_bytes(layout.SEALED)
    return front + bytes(image)


# ---- names


@given(pool=st.text(min_size=1), context=IDS, attempt=st.integers(1, 999), kind=st.sampled_from("ik"))
def test_names_round_trip(pool: str, context: str, attempt: int, kind: names.Kind) -> None:
    name = names.object_name(pool, context, kind, attempt)
    assert len(name) <= names.MAX_NAME
    assert names.parse_name(name) == names.ObjectName(names.pool_tag(pool), context, kind, attempt)


def test_name_is_the_documented_form() -> None:
    tag = "148de9c5"  # of SHA-256 of "p"
    assert names.pool_tag("a") == "ca978112"
    assert names.pool_tag("p") == tag
    assert names.image_name("p", "00112233aabb") == f"/gp-{tag}-00112233aabb-i1"
    assert names.kv_name("p", "00112233aabb", 12) == f"/gp-{tag}-00112233aabb-k12"


@pytest.mark.parametrize(
    "bad",
    [
        "gp-ca978112-00112233aabb-i1",  # no slash
        "/gp-ca978112-00112233aabb-i0",
        "/gp-ca978112-00112233aabb-i01",
        "/gp-ca978112-00112233aabb-i1000",
        "/gp-ca978112-00112233aabb-x1",
        "/gp-ca978112-00112233AABB-i1",
        "/gp-ca978112-00112233aab-i1",
        "/gp-ca978112-00112233aabb-i1\n",
        "/gp-ca978112-00112233aabb-i\u0661",  # an Arabic-Indic digit
        "/gp-ca978112-00112233aabb-i1\0",
        "/gp-ca978112-00112233aabb-i1/..",
        "",
    ],
)
def test_no_other_form_is_a_name(bad: str) -> None:
    assert names.parse_name(bad) is None
    with pytest.raises(ValueError, match="not the name"):
        names.check_name(bad)


@pytest.mark.parametrize("context", ["", "0" * 11, "0" * 13, "0" * 11 + "G", "../../../etc", "00112233aab\0"])
def test_only_an_id_of_the_brokers_form_makes_a_name(context: str) -> None:
    with pytest.raises(ValueError, match="12 lowercase"):
        names.object_name("p", context, "i")


@pytest.mark.parametrize("attempt", [0, -1, 1000])
def test_attempts_that_no_name_holds_are_refused(attempt: int) -> None:
    with pytest.raises(ValueError, match="attempt"):
        names.image_name("p", "00112233aabb", attempt)


# ---- sizes


@pytest.mark.parametrize(
    ("n_tokens", "pages"),
    [
        # header, tokens, logits (4000 bytes), recurrent (5000 bytes), tail rows of 96 bytes, block sums
        (1, 1 + 1 + 1 + 2 + 1 + 0),
        (42, 1 + 1 + 1 + 2 + 1 + 0),  # tail 4032
        (43, 1 + 1 + 1 + 2 + 2 + 0),  # tail 4128
        (63, 1 + 1 + 1 + 2 + 2 + 0),
        (64, 1 + 1 + 1 + 2 + 0 + 1),
        (65, 1 + 1 + 1 + 2 + 1 + 1),
        (1024, 1 + 1 + 1 + 2 + 0 + 1),
        (1025, 1 + 2 + 1 + 2 + 1 + 1),
        (64 * 512, 1 + 32 + 1 + 2 + 0 + 1),
        (64 * 513, 1 + 33 + 1 + 2 + 0 + 2),
    ],
)
def test_image_bytes_by_hand(n_tokens: int, pages: int) -> None:
    assert layout.image_bytes(GEOMETRY, n_tokens) == 4096 * pages


def test_object_bytes() -> None:
    small, large = envelope(), envelope(messages=(Message("user", "x" * 5000),))
    assert layout.envelope_bytes(small) == 4096
    assert layout.envelope_bytes(large) == 8192
    assert layout.image_object_bytes(GEOMETRY, 130, small) == 4096 + layout.image_bytes(GEOMETRY, 130)
    assert layout.kv_object_bytes(GEOMETRY, 0) == 0
    assert layout.kv_object_bytes(GEOMETRY, 3) == 3 * 8192


@given(st.integers(0, 9000))
def test_the_front_is_as_long_as_promised(n: int) -> None:
    value = envelope(messages=(Message("user", "y" * n),))
    front = layout.pack(value, pool=bytes(32), fingerprint=FINGERPRINT, numerics=1, image=4096)
    assert len(front) == layout.envelope_bytes(value)
    assert len(front) % 4096 == 0


# ---- pack and parse


def test_envelope_comes_back() -> None:
    value = envelope()
    stored = layout.parse(memoryview(sealed(value)), what="x")
    assert stored.envelope == value
    assert stored.pool == names.pool_digest("p")
    assert (stored.fingerprint, stored.numerics) == (FINGERPRINT, 7)
    assert (stored.image_offset, stored.image_bytes) == (4096, 8192)


def test_unfinished_is_refused() -> None:
    data = sealed(envelope())
    data[layout.STATE_OFFSET : layout.STATE_OFFSET + 4] = layout.state_bytes(layout.WRITING)
    with pytest.raises(ImageDamaged, match="never finished"):
        layout.parse(memoryview(data), what="x")


def test_every_flipped_byte_before_the_image_is_noticed() -> None:
    data = sealed(envelope())
    offset = layout.parse(memoryview(data), what="x").image_offset
    for at in range(offset):
        data[at] ^= 0x10
        with pytest.raises(ImageDamaged, match="x"):
            layout.parse(memoryview(data), what="x")
        data[at] ^= 0x10
    layout.parse(memoryview(data), what="x")


def test_the_image_itself_is_the_engines() -> None:
    data = sealed(envelope())
    data[4096] ^= 1
    layout.parse(memoryview(data), what="x")


@pytest.mark.parametrize("n", [0, 1, 127, 128, 4095, 4096, 4097, 12287])
def test_every_cut_is_noticed(n: int) -> None:
    with pytest.raises(ImageDamaged, match="x"):
        layout.parse(memoryview(sealed(envelope()))[:n], what="x")


def test_a_longer_object_is_noticed() -> None:
    with pytest.raises(ImageDamaged, match="fill it exactly"):
        layout.parse(memoryview(sealed(envelope()) + bytes(4096)), what="x")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_tokens": 0, "n_blocks": 0},
        {"n_blocks": 1},
        {"n_blocks": 3},
        {"first_block": 1},
        {"first_block": 1, "n_blocks": 1},  # blocks before its own, but no parent
        {"first_block": -1, "n_blocks": 3, "parent": "0" * 12},
    ],
)
def test_envelopes_that_contradict_themselves_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ImageDamaged, match="x"):
        layout.parse(memoryview(sealed(envelope(**changes))), what="x")


def test_another_envelope_under_a_right_checksum_is_refused() -> None:
    class Other(msgspec.Struct):
        id: int

    data = sealed(Other(5))  # type: ignore[arg-type]
    with pytest.raises(ImageDamaged, match="cannot be read"):
        layout.parse(memoryview(data), what="x")


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    with pytest.raises(ImageDamaged):
        layout.parse(memoryview(data), what="x")


# ---- ancestors


def ref(id: str, n_tokens: int, first_block: int) -> ContextRef:
    n_blocks = n_tokens // 64 - first_block
    kv = names.kv_name("p", id) if n_blocks else None
    return ContextRef(id, names.image_name("p", id), 1, kv, 8192 * n_blocks, first_block, n_blocks, n_tokens)


A, B = "0000000000aa", "0000000000bb"
CHAIN = (ref(A, 70, 0), ref(B, 100, 1))  # one block, none


def test_a_context_on_others_names_them() -> None:
    value = envelope(parent=B, chain=CHAIN, first_block=1, n_blocks=1)
    data = sealed(value)
    assert layout.parse(memoryview(data), what="x").envelope == value
    front = memoryview(data)[: layout.front_bytes(bytes(data[:128]), what="x")]
    assert layout.parse_front(front, len(data), what="x") == layout.parse(memoryview(data), what="x")


@pytest.mark.parametrize(
    "changes",
    [
        {"chain": ()},
        {"parent": None},
        {"parent": A},
        {"chain": CHAIN[1:]},
        {"chain": CHAIN[::-1]},
        {"chain": (CHAIN[0], ref(B, 200, 1))},
        {"chain": (ref(A, 60, 0), CHAIN[1])},
    ],
)
def test_ancestors_that_do_not_fit_are_refused(changes: dict[str, object]) -> None:
    value = envelope(**({"parent": B, "chain": CHAIN, "first_block": 1, "n_blocks": 1} | changes))
    with pytest.raises(ImageDamaged, match="x"):
        layout.parse(memoryview(sealed(value)), what="x")


# ---- grants that are ceilings


TEXT = "Hallo, Wanderer"


def grant(n_tokens: int, chain: tuple[ContextRef, ...], *, answer: str | None = None) -> Grant:
    """A ceiling with room for an answer's text; with `answer`, the exact grant."""
    first = chain[-1].n_tokens // 64 if chain else 0
    n_blocks = n_tokens // 64 - first
    value = envelope(
        parent=chain[-1].id if chain else None,
        chain=chain,
        n_tokens=n_tokens,
        first_block=first,
        n_blocks=n_blocks,
        messages=(Message("system", "x"), Message("assistant", answer or "")),
    )
    image = layout.image_object_bytes(GEOMETRY, n_tokens, value) + (4096 if answer is None else 0)
    return Grant(msgspec.structs.replace(ref(value.id, n_tokens, first), image_bytes=image), value, answer is None)


@given(st.integers(101, 70_000), st.integers(0, 70_000), st.booleans())
def test_a_ceiling_is_enough_for_everything_below_it(true: int, more: int, on_others: bool) -> None:
    """And the true sizes are those of a grant of the true length and text."""
    chain = CHAIN if on_others else ()
    assert layout.cut_to(grant(true + more, chain), true, GEOMETRY, TEXT) == grant(true, chain, answer=TEXT)


def test_without_messages_there_is_no_place_for_the_answer() -> None:
    bare = grant(200, ())
    bare = msgspec.structs.replace(bare, envelope=msgspec.structs.replace(bare.envelope, messages=None))
    assert layout.cut_to(bare, 190, GEOMETRY, TEXT).envelope.messages is None


@pytest.mark.parametrize(
    ("granted", "true", "text"), [(128, 129, ""), (200, 63, ""), (200, 190, "x" * 90_000)], ids=["tokens", "ancestors", "text"]
)
def test_more_than_the_ceiling_is_refused(granted: int, true: int, text: str) -> None:
    with pytest.raises(Internal, match="granted"):
        layout.cut_to(grant(granted, CHAIN if true == 63 else ()), true, GEOMETRY, text)


def test_an_exact_grant_is_left_alone() -> None:
    exact = grant(128, (), answer="")
    exact = msgspec.structs.replace(exact, ceiling=False)
    assert layout.cut_to(exact, 64, GEOMETRY, TEXT) is exact

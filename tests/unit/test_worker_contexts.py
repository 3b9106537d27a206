"""The contexts that a worker has mapped.

Property: image and blocks are verified exactly once per process, blocks of ancestors with the first context that needs them; what
does not verify is not kept; what is in use is not unmapped, and what is to be forgotten is unmapped as soon as it is not.
Tolerance: none. Reason: a forgotten object's memory counts until every worker has confirmed, and a block read unverified could
be anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest

from geist_pool.errors import ImageDamaged, ImageMismatch
from geist_pool.protocol import Chain, ContextRef, Envelope, Geometry
from geist_pool.store import layout, names, shm
from geist_pool.worker.contexts import ContextCache

GEOMETRY = Geometry(header_bytes=4096, n_vocab=10, recurrent_bytes=100, kv_bytes_per_token=8, kv_block_bytes=4096)
FINGERPRINT = "cd" * 32
IDS = ("0000000000aa", "0000000000bb", "0000000000cc")


def publish(pool: str, id: str, n_tokens: int, chain: Chain) -> ContextRef:
    parent = chain[-1] if chain else None
    first = parent.n_tokens // 64 if parent else 0
    n_blocks = n_tokens // 64 - first
    envelope = Envelope(id, None, "default", parent.id if parent else None, 0.0, None, False, n_tokens, first, n_blocks)
    envelope = msgspec.structs.replace(envelope, chain=chain)
    ref = ContextRef(
        id=id,
        image=names.image_name(pool, id),
        image_bytes=layout.image_object_bytes(GEOMETRY, n_tokens, envelope),
        kv=names.kv_name(pool, id) if n_blocks else None,
        kv_bytes=n_blocks * 4096,
        first_block=first,
        n_blocks=n_blocks,
        n_tokens=n_tokens,
    )
    with shm.Publication(ref, envelope, GEOMETRY, pool=pool, fingerprint=FINGERPRINT, numerics=1) as made:
        made.image[:8] = n_tokens.to_bytes(8, "little")
        made.seal()
    return ref


@pytest.fixture
def chain(pool_name: str) -> Iterator[Chain]:
    """130, 150 and 200 tokens: two blocks, none and one of their own."""
    refs: list[ContextRef] = []
    for id, n in zip(IDS, (130, 150, 200), strict=True):
        refs.append(publish(pool_name, id, n, tuple(refs)))
    yield tuple(refs)
    for found in shm.list_objects(pool_name):
        shm.unlink(found.name)


class Verifier:
    """Notes what it was asked; refuses when told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []  # tokens, areas, first block
        self.bad = False

    def __call__(self, image: memoryview, kv: Sequence[memoryview], first_block: int) -> None:
        self.asked.append((int.from_bytes(image[:8], "little"), len(kv), first_block))
        if self.bad:
            raise ImageDamaged("bad")


@pytest.fixture
def verifier() -> Verifier:
    return Verifier()


@pytest.fixture
def cache(pool_name: str, verifier: Verifier) -> Iterator[ContextCache]:
    made = ContextCache(pool_name, fingerprint=FINGERPRINT, numerics=1, verify=verifier)
    yield made
    made.close()


def test_from_the_root_on_every_block_is_verified_once(cache: ContextCache, verifier: Verifier, chain: Chain) -> None:
    for _ in range(2):
        for n in (1, 2, 3):
            cache.map(chain[:n])
    assert verifier.asked == [(130, 1, 0), (150, 1, 2), (200, 2, 2)]


def test_a_leaf_alone_verifies_its_ancestors_blocks(cache: ContextCache, verifier: Verifier, chain: Chain) -> None:
    cache.map(chain)
    cache.map(chain[:2])
    cache.map(chain[:1])
    assert verifier.asked == [(200, 2, 0), (150, 1, 2), (130, 1, 2)]


def test_an_ancestors_image_is_not_needed(cache: ContextCache, chain: Chain) -> None:
    for ref in chain[:2]:
        shm.unlink(ref.image)
    found = cache.map(chain)
    assert int.from_bytes(found.image[:8], "little") == 200
    assert [len(area) for area in found.kv] == [8192, 4096]


def test_what_does_not_verify_is_not_kept(cache: ContextCache, verifier: Verifier, chain: Chain) -> None:
    cache.map(chain[:1])
    verifier.bad = True
    for _ in range(2):
        with pytest.raises(ImageDamaged):
            cache.map(chain)
    assert len(cache) == 1
    verifier.bad = False
    cache.map(chain)
    assert verifier.asked == [(130, 1, 0), (200, 2, 2), (200, 2, 2), (200, 2, 2)]


def test_a_missing_object_leaves_nothing_mapped(cache: ContextCache, chain: Chain) -> None:
    assert chain[2].kv is not None
    shm.unlink(chain[2].kv)
    with pytest.raises(ImageDamaged):
        cache.map(chain)
    assert len(cache) == 0


def test_another_models_context_is_refused(pool_name: str, verifier: Verifier, chain: Chain) -> None:
    for pool, fingerprint, numerics in (("x", FINGERPRINT, 1), (pool_name, "ee" * 32, 1), (pool_name, FINGERPRINT, 2)):
        other = ContextCache(pool, fingerprint=fingerprint, numerics=numerics, verify=verifier)
        with pytest.raises(ImageMismatch):
            other.map(chain)
        assert len(other) == 0
    assert verifier.asked == []


def test_what_is_in_use_is_forgotten_later(cache: ContextCache, verifier: Verifier, chain: Chain) -> None:
    cache.acquire(chain)
    cache.acquire(chain[:1])
    for id in (*IDS, "0000000000dd"):
        cache.forget(id)
    assert cache.collect() == ["0000000000dd"], "what is not mapped is not waited for"
    cache.release(chain)
    assert cache.collect() == [IDS[1], IDS[2]]
    cache.release(chain[:1])
    assert cache.collect() == [IDS[0]]
    assert cache.collect() == []
    assert len(cache) == 0
    cache.map(chain[:1])
    assert verifier.asked[-1] == (130, 1, 0), "what comes back is verified again"


def test_a_borrowed_mapping_is_not_called_forgotten(cache: ContextCache, verifier: Verifier, chain: Chain) -> None:
    borrowed = memoryview(cache.map(chain[:1]).kv[0])
    cache.forget(IDS[0])
    assert cache.collect() == []
    borrowed.release()
    assert cache.collect() == [IDS[0]]
    assert len(cache) == 0

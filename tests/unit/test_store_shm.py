"""Objects in shared memory: made exclusively, reserved in full, sealed last, found again.

Property: whatever goes wrong while an object is made, nothing of it is left (FINDINGS row 16: a full /dev/shm is `store_full`
now, and no SIGBUS later); what a killed process leaves is found by `scan` and told from sound contexts (FINDINGS row 15); nothing
that another user, another pool or another program made is adopted. Tolerance: none. Reason: this is the only memory that
processes share, and the only thing that outlives a crash.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import posix_ipc
import pytest

from geist_pool.errors import ImageDamaged, Internal, StoreFull
from geist_pool.protocol import Chain, ContextRef, Envelope, Geometry
from geist_pool.store import layout, names, shm, unfinished

GEOMETRY = Geometry(header_bytes=4096, n_vocab=10, recurrent_bytes=100, kv_bytes_per_token=8, kv_block_bytes=4096)
FINGERPRINT = "cd" * 32
NUMERICS = 3
PARENT, CHILD, GRANDCHILD = "0000000000aa", "0000000000bb", "0000000000cc"


def context(pool: str, id: str, n_tokens: int, *, chain: Chain = (), attempt: int = 1) -> tuple[ContextRef, Envelope]:
    parent = chain[-1].id if chain else None
    first_block = chain[-1].n_tokens // 64 if chain else 0
    n_blocks = n_tokens // 64 - first_block
    envelope = Envelope(
        id=id,
        name=f"name of {id}",
        space="default",
        parent=parent,
        created=1.0,
        ttl_s=None,
        pin=False,
        n_tokens=n_tokens,
        first_block=first_block,
        n_blocks=n_blocks,
        chain=chain,
    )
    ref = ContextRef(
        id=id,
        image=names.image_name(pool, id, attempt),
        image_bytes=layout.image_object_bytes(GEOMETRY, n_tokens, envelope),
        kv=names.kv_name(pool, id, attempt) if n_blocks else None,
        kv_bytes=n_blocks * 4096,
        first_block=first_block,
        n_blocks=n_blocks,
        n_tokens=n_tokens,
    )
    return ref, envelope


def publication(pool: str, ref: ContextRef, envelope: Envelope) -> shm.Publication:
    return shm.Publication(ref, envelope, GEOMETRY, pool=pool, fingerprint=FINGERPRINT, numerics=NUMERICS)


def publish(pool: str, ref: ContextRef, envelope: Envelope) -> None:
    """A context whose "image" says its token count in its first bytes; `check` below reads that."""
    with publication(pool, ref, envelope) as made:
        made.image[:4] = ref.n_tokens.to_bytes(4, "little")
        if made.kv is not None:
            made.kv[:] = b"k" * len(made.kv)
        made.seal()


def check(image: memoryview, kv: Sequence[memoryview], first_block: int) -> Sequence[int]:
    n = int.from_bytes(image[:4], "little")
    if n == 0:
        raise ImageDamaged("no tokens")
    assert sum(len(area) for area in kv) == n // 64 * 4096
    return range(n)


def scan(pool: str, **changes: object) -> shm.Scan:
    arguments: dict[str, object] = {
        "fingerprint": FINGERPRINT,
        "numerics": NUMERICS,
        "geometry": GEOMETRY,
        "check": check,
    }
    return shm.scan(pool, **(arguments | changes))  # type: ignore[arg-type]


def clean(pool: str) -> None:
    for found in shm.list_objects(pool):
        shm.unlink(found.name)


def path(name: str) -> Path:
    return shm.SHM / name[1:]


def free_bytes() -> int:
    found = os.statvfs(shm.SHM)
    return found.f_bfree * found.f_frsize


# ---- one object


def test_an_object_that_is_not_kept_goes(pool_name: str) -> None:
    name = names.image_name(pool_name, PARENT)
    with shm.Writer(name, 10_000) as writer:
        assert bytes(writer.view) == bytes(10_000)
        status = path(name).stat()
        assert status.st_mode & 0o7777 == 0o600
        assert status.st_blocks * 512 >= 10_000, "not reserved"
        assert shm.total_bytes(pool_name) == 10_000
    assert shm.list_objects(pool_name) == []


def test_an_error_while_filling_removes_it(pool_name: str) -> None:
    with pytest.raises(ZeroDivisionError), shm.Writer(names.image_name(pool_name, PARENT), 4096):
        raise ZeroDivisionError
    assert shm.list_objects(pool_name) == []


def test_a_kept_object_is_read_by_others_and_never_written(pool_name: str) -> None:
    name = names.image_name(pool_name, PARENT)
    with shm.Writer(name, 4096) as writer:
        writer.view[:3] = b"abc"
        writer.keep()
    with shm.Mapping(name, 4096) as mapping:
        assert bytes(mapping.view[:3]) == b"abc"
        assert mapping.view.readonly
        assert shm.unlink(name)
        assert bytes(mapping.view[:3]) == b"abc", "an unlinked object stays for who has it mapped"
    assert not shm.unlink(name)


def test_an_existing_object_is_refused_and_left_alone(pool_name: str) -> None:
    name = names.image_name(pool_name, PARENT)
    with shm.Writer(name, 4096) as first:
        first.view[:1] = b"1"
        with pytest.raises(Internal, match="exists already"):
            shm.Writer(name, 4096)
        with shm.Mapping(name) as mapping:
            assert bytes(mapping.view[:1]) == b"1"


@pytest.mark.parametrize("name", ["/gp-\0", "/gp-ca978112-00112233aabb-i1\0", "/etc/passwd", "", "/gp-x"])
def test_no_other_name_reaches_the_system(name: str) -> None:
    """A NUL in a name kills the interpreter inside posix_ipc."""
    for call in (lambda: shm.Writer(name, 1), lambda: shm.Mapping(name), lambda: shm.unlink(name)):
        with pytest.raises(ValueError, match="not the name"):
            call()


def test_what_is_not_there_or_not_ours_is_not_mapped(pool_name: str) -> None:
    name = names.image_name(pool_name, PARENT)
    with pytest.raises(ImageDamaged, match="there is no") as missing:
        shm.Mapping(name)
    assert missing.value.data["missing"]
    with shm.Writer(name, 4096):
        with pytest.raises(ImageDamaged, match="4096 bytes instead of 8192"):
            shm.Mapping(name, 8192)
        path(name).chmod(0o644)
        with pytest.raises(ImageDamaged, match="0644"):
            shm.Mapping(name)


def test_an_empty_object_is_not_mapped(pool_name: str) -> None:
    name = names.image_name(pool_name, PARENT)
    posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=0).close_fd()
    with pytest.raises(ImageDamaged, match="empty"):
        shm.Mapping(name)
    assert [r.name for r in scan(pool_name).residue] == [name]
    shm.unlink(name)


def test_a_borrowed_mapping_does_not_close(pool_name: str) -> None:
    with shm.Writer(names.image_name(pool_name, PARENT), 4096) as writer:
        mapping = shm.Mapping(writer.name)
        borrowed = memoryview(mapping.view)
        with pytest.raises(BufferError):
            mapping.close()
        borrowed.release()
        mapping.close()
        mapping.close()


# ---- a full store


def test_more_than_all_of_shared_memory_is_store_full(pool_name: str) -> None:
    found = os.statvfs(shm.SHM)
    too_much = (found.f_blocks + 1024) * found.f_frsize
    before = free_bytes()
    with pytest.raises(StoreFull) as caught:
        shm.Writer(names.image_name(pool_name, PARENT), too_much)
    assert caught.value.data["needed"] == too_much
    assert shm.list_objects(pool_name) == []
    assert free_bytes() >= before - (64 << 20), "a refused reservation keeps memory (others may use some meanwhile)"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
@pytest.mark.parametrize("full_at", [1, 2])
def test_a_store_that_fills_up_leaves_neither_object(
    pool_name: str, monkeypatch: pytest.MonkeyPatch, full_at: int, number: int
) -> None:
    """The image fits and the KV object does not, or not even the image."""
    calls = iter(range(1, 3))
    real = shm._reserve

    def reserve(fd: int, n: int) -> None:
        if next(calls) == full_at:
            raise OSError(number, os.strerror(number))
        real(fd, n)

    monkeypatch.setattr(shm, "_reserve", reserve)
    with pytest.raises(StoreFull):
        publication(pool_name, *context(pool_name, PARENT, 200))
    assert shm.list_objects(pool_name) == []


def test_a_file_size_limit_is_store_full(pool_name: str) -> None:
    """RLIMIT_FSIZE in a process of its own: a real refusal of the real call, after part of the memory was had."""
    script = (
        "import resource, sys\n"
        "from geist_pool.store import names, shm\n"
        "from geist_pool.errors import StoreFull\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    shm.Writer(names.image_name(sys.argv[1], '0000000000aa'), 8 << 20)\n"
        "except StoreFull as e:\n"
        "    print(len(shm.list_objects(sys.argv[1])), e.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, pool_name], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "store_full"]


# ---- a context's objects


def test_a_publication_is_found_whole(pool_name: str) -> None:
    ref, envelope = context(pool_name, PARENT, 130)
    publish(pool_name, ref, envelope)
    found = scan(pool_name)
    assert found.residue == ()
    assert found.sound == (shm.Sound(envelope, ref, tuple(range(130))),)
    assert shm.total_bytes(pool_name) == ref.image_bytes + ref.kv_bytes
    clean(pool_name)


def test_what_is_not_sealed_goes(pool_name: str) -> None:
    with publication(pool_name, *context(pool_name, PARENT, 130)) as made:
        made.image[:4] = b"\x82\0\0\0"
        assert len(shm.list_objects(pool_name)) == 2
    assert shm.list_objects(pool_name) == []


@pytest.mark.parametrize("changes", [{"image_bytes": 4096}, {"kv_bytes": 4096}, {"kv": None}, {"n_tokens": 60}])
def test_a_grant_of_other_sizes_is_refused(pool_name: str, changes: dict[str, object]) -> None:
    ref, envelope = context(pool_name, PARENT, 130)
    with pytest.raises(Internal, match="granted"):
        publication(pool_name, msgspec.structs.replace(ref, **changes), envelope)
    assert shm.list_objects(pool_name) == []


def test_an_existing_kv_object_is_left_alone_and_the_image_goes(pool_name: str) -> None:
    ref, envelope = context(pool_name, PARENT, 130)
    assert ref.kv is not None
    with shm.Writer(ref.kv, 4096):
        with pytest.raises(Internal, match="exists already"):
            publication(pool_name, ref, envelope)
        assert [f.name for f in shm.list_objects(pool_name)] == [ref.kv]


def test_a_killed_writer_leaves_residue_only(pool_name: str) -> None:
    """SIGKILL between filling and sealing."""
    script = (
        "import os, sys\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "import test_store_shm as t\n"
        "made = t.publication(sys.argv[1], *t.context(sys.argv[1], t.PARENT, 130))\n"
        "made.image[:4] = b'\\x82\\0\\0\\0'\n"
        "os.kill(os.getpid(), 9)\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", script, pool_name, here], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = scan(pool_name)
    assert found.sound == ()
    assert [r.reason for r in found.residue if "-i" in r.name] == [f"{names.image_name(pool_name, PARENT)} was never finished"]
    assert sorted(found.unlink) == [f.name for f in shm.list_objects(pool_name)]
    assert len(found.unlink) == 2
    for name in found.unlink:
        shm.unlink(name)


def test_what_is_unfinished_can_be_undone_from_outside(pool_name: str) -> None:
    """As a process does whose pool is gone; what is sealed stays."""
    sealed, half = context(pool_name, PARENT, 130), context(pool_name, CHILD, 130)
    publish(pool_name, *sealed)
    with publication(pool_name, *half):
        assert len(shm.list_objects(pool_name)) == 4
        unfinished.undo_all()
        assert {f.name for f in shm.list_objects(pool_name)} == {sealed[0].image, sealed[0].kv}
    unfinished.undo_all()
    clean(pool_name)


def test_one_that_cannot_be_undone_does_not_keep_the_others() -> None:
    undone: list[int] = []
    unfinished.begin(lambda: undone.append(1))
    unfinished.begin(lambda: 1 // 0)
    unfinished.end(unfinished.begin(lambda: undone.append(2)))
    unfinished.begin(lambda: undone.append(3))
    unfinished.undo_all()
    unfinished.undo_all()
    assert undone == [1, 3]


# ---- scan


def family(pool: str) -> list[tuple[ContextRef, Envelope]]:
    """Three generations: 130, 200 and 210 tokens; the last has no whole block of its own."""
    parent = context(pool, PARENT, 130)
    child = context(pool, CHILD, 200, chain=(parent[0],))
    made = [parent, child, context(pool, GRANDCHILD, 210, chain=(parent[0], child[0]))]
    for ref, envelope in reversed(made):
        publish(pool, ref, envelope)
    return made


def test_parents_come_before_children(pool_name: str) -> None:
    made = family(pool_name)
    found = scan(pool_name)
    assert [(s.ref, s.envelope) for s in found.sound] == made
    assert found.residue == ()
    clean(pool_name)


def damage(name: str, at: int) -> None:
    with path(name).open("r+b") as f:
        f.seek(at)
        byte = f.read(1)
        f.seek(at)
        f.write(bytes((byte[0] ^ 1,)))


def break_envelope(made: list[tuple[ContextRef, Envelope]]) -> None:
    damage(made[1][0].image, 200)


def break_image(made: list[tuple[ContextRef, Envelope]]) -> None:
    with path(made[1][0].image).open("r+b") as f:
        f.seek(4096)
        f.write(bytes(4))


def lose_kv(made: list[tuple[ContextRef, Envelope]]) -> None:
    assert made[1][0].kv is not None
    shm.unlink(made[1][0].kv)


def cut_kv(made: list[tuple[ContextRef, Envelope]]) -> None:
    assert made[1][0].kv is not None
    os.truncate(path(made[1][0].kv), 100)


def cut_image(made: list[tuple[ContextRef, Envelope]]) -> None:
    os.truncate(path(made[1][0].image), 4096 * 3)


def open_mode(made: list[tuple[ContextRef, Envelope]]) -> None:
    path(made[1][0].image).chmod(0o666)


def open_kv_mode(made: list[tuple[ContextRef, Envelope]]) -> None:
    assert made[1][0].kv is not None
    path(made[1][0].kv).chmod(0o666)


def lose_image(made: list[tuple[ContextRef, Envelope]]) -> None:
    shm.unlink(made[1][0].image)


Harm = Callable[[list[tuple[ContextRef, Envelope]]], None]


@pytest.mark.parametrize("harm", [lose_kv, cut_kv, open_kv_mode], ids=lambda f: f.__name__)
def test_without_its_blocks_a_context_goes_with_its_children(pool_name: str, harm: Harm) -> None:
    made = family(pool_name)
    harm(made)
    found = scan(pool_name)
    assert [s.ref for s in found.sound] == [made[0][0]]
    assert found.orphans == ()
    kept = {made[0][0].image, made[0][0].kv}
    assert sorted(found.unlink) == [f.name for f in shm.list_objects(pool_name) if f.name not in kept]
    clean(pool_name)


@pytest.mark.parametrize("harm", [break_envelope, break_image, cut_image, open_mode, lose_image], ids=lambda f: f.__name__)
def test_without_its_image_a_contexts_blocks_stay_for_its_children(pool_name: str, harm: Harm) -> None:
    """An evicted ancestor, or one whose image was harmed: only its KV object is needed."""
    made = family(pool_name)
    harm(made)
    found = scan(pool_name)
    assert [(s.ref, s.envelope) for s in found.sound] == [made[0], made[2]]
    assert found.orphans == (made[1][0],)
    assert found.unlink == [n for n in (made[1][0].image,) if path(n).exists()]
    clean(pool_name)


def test_all_ancestors_images_may_be_gone(pool_name: str) -> None:
    made = family(pool_name)
    for ref, _ in made[:2]:
        shm.unlink(ref.image)
    found = scan(pool_name)
    assert [s.ref for s in found.sound] == [made[2][0]]
    assert found.orphans == (made[0][0], made[1][0])
    assert found.residue == ()
    shm.unlink(made[2][0].image)
    found = scan(pool_name)
    assert (found.sound, found.orphans) == ((), ())
    assert sorted(found.unlink) == [f.name for f in shm.list_objects(pool_name)], "nobody needs the blocks any more"
    assert len(found.unlink) == 2
    clean(pool_name)


def test_each_block_is_verified_once(pool_name: str) -> None:
    """By the image of the first sound context that needs it; of an orphan by a descendant's."""
    asked: list[tuple[int, int]] = []

    def note(image: memoryview, kv: Sequence[memoryview], first_block: int) -> Sequence[int]:
        tokens = check(image, kv, first_block)
        asked.append((len(tokens), first_block))
        return tokens

    made = family(pool_name)
    scan(pool_name, check=note)
    assert asked == [(130, 0), (200, 2), (210, 3)]
    shm.unlink(made[0][0].image)
    asked.clear()
    scan(pool_name, check=note)
    assert asked == [(200, 0), (210, 3)]
    shm.unlink(made[1][0].image)
    asked.clear()
    scan(pool_name, check=note)
    assert asked == [(210, 0)]
    clean(pool_name)


def test_a_descendant_that_does_not_verify_keeps_no_blocks(pool_name: str) -> None:
    made = family(pool_name)
    shm.unlink(made[1][0].image)
    with path(made[2][0].image).open("r+b") as f:
        f.seek(made[2][0].image_bytes - layout.image_bytes(GEOMETRY, 210))
        f.write(bytes(4))
    found = scan(pool_name)
    assert [s.ref for s in found.sound] == [made[0][0]]
    assert found.orphans == ()
    assert sorted(found.unlink) == sorted(n for n in (made[1][0].kv, made[2][0].image) if n is not None)
    clean(pool_name)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv": "/gp-00000000-0000000000aa-k1"},
        {"kv": None},
        {"kv": "../../etc/passwd"},
        {"kv_bytes": 4096},
        {"id": CHILD},
    ],
)
def test_an_ancestor_under_a_strange_name_is_none(pool_name: str, changes: dict[str, object]) -> None:
    """Nothing is opened, adopted or unlinked on the word of an envelope alone."""
    ref, envelope = context(pool_name, PARENT, 130)
    publish(pool_name, ref, envelope)
    wrong = msgspec.structs.replace(ref, **changes)
    child, its = context(pool_name, GRANDCHILD, 140, chain=(wrong,))
    publish(pool_name, child, its)
    found = scan(pool_name)
    assert [s.ref for s in found.sound] == [ref]
    assert found.unlink == [child.image]
    clean(pool_name)


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "ee" * 32},
        {"numerics": 4},
        {"geometry": msgspec.structs.replace(GEOMETRY, recurrent_bytes=9000)},
        {"geometry": msgspec.structs.replace(GEOMETRY, kv_block_bytes=8192)},
    ],
)
def test_contexts_of_another_model_or_version_go(pool_name: str, changes: dict[str, object]) -> None:
    family(pool_name)
    found = scan(pool_name, **changes)
    assert found.sound == ()
    assert sorted(found.unlink) == [f.name for f in shm.list_objects(pool_name)]
    clean(pool_name)


def test_an_image_under_another_contexts_name_goes(pool_name: str) -> None:
    ref, envelope = context(pool_name, PARENT, 60)
    publish(pool_name, ref, envelope)
    path(ref.image).rename(path(names.image_name(pool_name, CHILD)))
    assert scan(pool_name).unlink == [names.image_name(pool_name, CHILD)]
    clean(pool_name)


def test_two_attempts_of_one_context_are_one(pool_name: str) -> None:
    for attempt in (1, 2):
        publish(pool_name, *context(pool_name, PARENT, 60, attempt=attempt))
    found = scan(pool_name)
    assert [s.ref.image for s in found.sound] == [names.image_name(pool_name, PARENT, 1)]
    assert found.unlink == [names.image_name(pool_name, PARENT, 2)]
    clean(pool_name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give an object to another user")
def test_another_users_object_is_neither_adopted_nor_removed(pool_name: str) -> None:
    """Two users may each run a pool of the same name."""
    ref, envelope = context(pool_name, PARENT, 60)
    publish(pool_name, ref, envelope)
    os.chown(path(ref.image), 65534, -1)
    found = scan(pool_name)
    assert not found.sound and not found.residue and not shm.list_objects(pool_name)
    with pytest.raises(ImageDamaged, match="belongs to user 65534"):
        shm.Mapping(ref.image)
    os.chown(path(ref.image), os.geteuid(), -1)
    clean(pool_name)


def test_a_kv_object_alone_goes(pool_name: str) -> None:
    with shm.Writer(names.kv_name(pool_name, PARENT), 4096) as writer:
        found = scan(pool_name)
        assert [(r.name, r.reason) for r in found.residue] == [(writer.name, "belongs to no sound context")]


def test_other_pools_are_not_seen(new_pool_name: Callable[[], str]) -> None:
    mine, other = new_pool_name(), new_pool_name()
    publish(mine, *context(mine, PARENT, 60))
    assert scan(other) == shm.Scan((), (), ())
    assert shm.list_objects(other) == []
    clean(mine)

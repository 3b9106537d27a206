"""Files of saved contexts: their heads, and what a directory holds while one is written.

Property: under a name there is a whole file or none, whatever ends the writer; a head is refused unless every byte of it is
right; a file that changes while it is read is noticed. Tolerance: none. Reason: the broker decides by a head alone where a file
goes.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from geist_pool.errors import EngineError, ImageDamaged, StoreFull, UnknownContext
from geist_pool.protocol import ContextRef, Envelope, Message
from geist_pool.store import files, layout, unfinished

FINGERPRINT = "cd" * 32
ANCESTOR = ContextRef("0000000000bb", "/gp-00000000-0000000000bb-i1", 1, "/gp-00000000-0000000000bb-k1", 1, 0, 1, 70)
ENVELOPE = Envelope(
    id="0000000000aa",
    name="Wirtin",
    space="default",
    parent=ANCESTOR.id,
    created=1.0,
    ttl_s=60,
    pin=True,
    n_tokens=200,
    first_block=1,
    n_blocks=2,
    messages=(Message("user", "Grüß Gott"),),
    chain=(ANCESTOR,),
)
IMAGE = bytearray(os.urandom(3 * 4096))


def writer(path: Path, envelope: Envelope = ENVELOPE) -> files.Writer:
    return files.Writer(path, envelope, pool="p", fingerprint=FINGERPRINT, numerics=3)


def write(path: Path, image: bytearray = IMAGE) -> list[int]:
    with writer(path) as made:
        steps = list(made.write(image))
        made.publish()
    return steps


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_a_file_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.geist"
    assert write(path)[-1] == path.stat().st_size == 4096 + len(IMAGE)
    head = files.peek(path)
    assert head == (files.alone(ENVELOPE), 200, FINGERPRINT, path.stat().st_size)
    assert (head.envelope.parent, head.envelope.chain, head.envelope.first_block, head.envelope.n_blocks) == (None, (), 0, 3)
    assert (head.envelope.name, head.envelope.messages) == ("Wirtin", ENVELOPE.messages)
    with files.Reader(path) as reader:
        assert list(reader) == [len(IMAGE)]
        assert reader.image == IMAGE
        assert reader.stored.numerics == 3
    assert path.stat().st_mode & 0o7777 == 0o600


def test_large_files_go_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", 5000)
    assert write(tmp_path / "a") == [4096, 9096, 14096, 4096 + len(IMAGE)]
    with files.Reader(tmp_path / "a") as reader:
        assert list(reader) == [5000, 10000, len(IMAGE)]
        assert reader.image == IMAGE


def test_what_is_not_published_goes(tmp_path: Path) -> None:
    write(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    with writer(tmp_path / "a") as made:
        for _ in made.write(bytearray(4096)):
            assert len(names(tmp_path)) == 2
            assert (tmp_path / "a").read_bytes() == before
    assert names(tmp_path) == ["a"]
    with pytest.raises(ZeroDivisionError), writer(tmp_path / "a"):
        raise ZeroDivisionError
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == before


def test_the_end_of_the_process_takes_it_along(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with writer(tmp_path / "b") as made:
        list(made.write(IMAGE))
        unfinished.undo_all()
        assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("call", ["write", "fdatasync", "fsync"])
@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, StoreFull), (errno.EDQUOT, StoreFull), (errno.EIO, EngineError)])
def test_a_disk_that_refuses_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kind: type[Exception]
) -> None:
    write(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, call, refuse)
    with pytest.raises(kind, match="a"):
        write(tmp_path / "a", bytearray(4096))
    monkeypatch.undo()
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == before


def test_only_what_dead_writers_left_is_stale(tmp_path: Path) -> None:
    dead = tmp_path / ".b.1.tmp"
    dead.write_bytes(b"half")
    other = tmp_path / "b.tmp"
    other.write_bytes(b"somebody's")
    with writer(tmp_path / "a") as made:
        assert not dead.exists()
        assert len(names(tmp_path)) == 2
        assert files.remove_stale(tmp_path) == 0, "its writer is alive"
        list(made.write(IMAGE))
        made.publish()
    assert names(tmp_path) == ["a", "b.tmp"]
    assert files.remove_stale(tmp_path / "none") == 0


def test_every_flipped_byte_of_the_head_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path)
    whole = path.read_bytes()
    for at in range(4096):
        path.write_bytes(whole[:at] + bytes((whole[at] ^ 0x10,)) + whole[at + 1 :])
        with pytest.raises(ImageDamaged, match="a"):
            files.peek(path)


@pytest.mark.parametrize("n", [0, 1, 127, 128, 4095, 4096, 4097, 3 * 4096])
def test_every_cut_is_noticed(tmp_path: Path, n: int) -> None:
    write(tmp_path / "a")
    os.truncate(tmp_path / "a", n)
    for call in (files.peek, files.Reader):
        with pytest.raises(ImageDamaged, match="a"):
            call(tmp_path / "a")


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE", 4096)
    write(tmp_path / "a")
    with files.Reader(tmp_path / "a") as reader, pytest.raises(ImageDamaged, match="was cut while it was read"):
        for _ in reader:
            os.truncate(tmp_path / "a", 8192)


def test_a_head_with_ancestors_is_none(tmp_path: Path) -> None:
    """An object's envelope in front of whatever."""
    front = bytearray(layout.pack(ENVELOPE, pool=bytes(32), fingerprint=FINGERPRINT, numerics=3, image=4096))
    front[layout.STATE_OFFSET : layout.STATE_OFFSET + 4] = layout.state_bytes(layout.SEALED)
    (tmp_path / "a").write_bytes(front + bytes(4096))
    with pytest.raises(ImageDamaged, match="ancestors"):
        files.peek(tmp_path / "a")


def test_where_there_is_no_file_errors_say_so_without_a_path(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("none", UnknownContext), ("pipe", ImageDamaged), (".", ImageDamaged), ("pipe/x", EngineError)):
        with pytest.raises(kind) as caught:
            files.peek(tmp_path / name)
        assert str(tmp_path.parent) not in str(caught.value)
    with pytest.raises(EngineError):
        writer(tmp_path / "none" / "a")
    assert names(tmp_path) == ["pipe"]


def test_the_envelope_of_a_context_on_its_own_is_left_alone() -> None:
    own = msgspec.structs.replace(ENVELOPE, parent=None, chain=(), first_block=0, n_blocks=3)
    assert files.alone(own) == own

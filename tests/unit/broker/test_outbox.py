"""Property: what a slow reader does not take is kept in order up to a limit; beyond it chunks are lost and every answer becomes
the short message that ends its request; what was lost is counted. Tolerance: none. Reason: a request that never ends hangs its
client."""

from __future__ import annotations

from geist_pool.broker import outbox
from geist_pool.broker.outbox import Outbox, Outcome


class Reader:
    def __init__(self) -> None:
        self.state: Outcome = "full"
        self.got: list[bytes] = []

    def send(self, frames: object) -> Outcome:
        if self.state == "sent":
            self.got.append(frames[1])  # type: ignore[index]
        return self.state


def fill(n_max: int = 3, bytes_max: int = 1 << 20) -> tuple[Reader, Outbox]:
    reader = Reader()
    return reader, Outbox(reader.send, messages_max=n_max, bytes_max=bytes_max)


def offer(box: Outbox, body: bytes, short: bytes | None = None) -> int | None:
    """What was lost, or None if it was kept."""
    word = None if short is None else lambda: [b"p", short]
    if box.send([b"p", body], word) == "over":
        return box.shed([b"p", body], word)
    return None


def test_in_order_and_nothing_twice() -> None:
    reader, box = fill()
    assert [offer(box, b"chunk 1"), offer(box, b"chunk 2"), offer(box, b"answer", b"x")] == [None] * 3
    assert box.flush() == [] and box
    reader.state = "sent"
    assert box.flush() == [] and not box
    assert reader.got == [b"chunk 1", b"chunk 2", b"answer"]


def test_beyond_the_limit_every_request_still_ends() -> None:
    reader, box = fill()
    for body, short in ((b"chunk", None), (b"answer 1", b"no 1"), (b"answer 2", b"no 2")):
        assert offer(box, body, short) is None
    assert offer(box, b"chunk of three") == 4
    assert offer(box, b"answer 3", b"no 3") is None  # there is room again
    reader.state = "sent"
    box.flush()
    assert reader.got == [b"no 1", b"no 2", b"answer 3"]


def test_bytes_count_too_and_what_is_short_already_is_not_lost() -> None:
    reader, box = fill(n_max=100, bytes_max=20)
    assert offer(box, b"12345678", b"n") is None
    assert offer(box, b"s", b"longer") is None
    assert offer(box, b"12345678901", b"m") == 2
    reader.state = "sent"
    box.flush()
    assert reader.got == [b"n", b"s", b"m"]


def test_last_words_have_a_limit_of_their_own(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(outbox, "LAST_WORDS_MAX", 5)
    _, box = fill(n_max=1)
    lost = [offer(box, b"answer", b"no") for _ in range(20)]
    assert sum(n or 0 for n in lost) == 20
    assert box.drop(b"p") == 5 and not box


def test_nothing_is_kept_for_chunks_alone() -> None:
    _, box = fill(n_max=1)
    assert offer(box, b"a") is None and offer(box, b"b") == 2
    assert not box


def test_gone() -> None:
    reader, box = fill()
    offer(box, b"a")
    reader.state = "gone"
    assert box.flush() == [b"p"] and box.drop(b"p") == 1

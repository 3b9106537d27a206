"""What `top`, `story` and the lists show, from values made here.

Property: rates are exact differences over time, and none where the broker began anew; contexts stand under those they continue;
nothing that a client named can command the terminal. Tolerance: none. Reason: who looks at it decides by it.
"""

from __future__ import annotations

import io

import msgspec
from rich.console import Console, RenderableType

from geist_pool import show, top
from geist_pool.protocol import ContextInfo, StatsResult, StoryEvent, WorkerStats

STATS = StatsResult(
    uptime_s=100.0,
    workers=2,
    workers_busy=1,
    queue=3,
    requests={"score": 10, "generate": 5},
    errors={"busy": 1},
    tokens_reused=700,
    tokens_prefilled=50,
    tokens_generated=20,
    contexts=2,
    store_bytes=1 << 20,
    store_limit=4 << 20,
    store_orphaned_bytes=0,
    store_unmapping_bytes=0,
    evictions=7,
    jobs_retried=0,
    workers_lost=0,
    chunks_dropped=0,
    passes=40,
    requests_active=4,
    fleet=(WorkerStats("w0.0", 77, 1, 2, 9, 40, 50, 20, 2, 5 << 20, 1 << 20),),
)


def text_of(what: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=160, highlight=False).print(what)
    return out.getvalue()


def context(id: str, parent: str | None = None, name: str | None = None, used: float = 50.0, **more: object) -> ContextInfo:
    fields = {"space": "default", "n_tokens": 10, "bytes": 2048, "created": 10.0, "expires": None, "pinned": False, "leases": 0}
    return ContextInfo(id=id, name=name, parent=parent, last_used=used, **{**fields, **more})  # type: ignore[arg-type]


def test_rates_are_differences_per_second() -> None:
    later = msgspec.structs.replace(
        STATS, uptime_s=102.0, requests={"score": 14, "generate": 5}, errors={"busy": 2}, tokens_generated=30, passes=60
    )
    a, b = top.Sample(1.0, STATS, ()), top.Sample(3.0, later, ())
    assert top.rates(a, b) == top.Rates(requests=2, errors=0.5, reused=0, prefilled=0, generated=5, passes=10)
    assert top.rates(b, a) is None
    restarted = top.Sample(5.0, msgspec.structs.replace(STATS, uptime_s=1.0), ())
    assert top.rates(b, restarted) is None


def test_frame_shows_workers_slots_memory_and_tree() -> None:
    sample = top.Sample(1.0, STATS, (context("aa", name="world"), context("bb", "aa", "hesper"), context("cc", "gone")))
    text = text_of(top.frame(sample, top.Rates(2, 0.5, 1, 2, 3, 4), title="pool", now=130.0))
    for words in ("1 of 2 taken", "1.0 MiB of 4.0 MiB (25 %)", "7 evictions", "2.0 requests", "3.0 generated", "w0.0", "77"):
        assert words in text
    lines = text.splitlines()
    world, hesper = (next(i for i, line in enumerate(lines) if word in line) for word in ("world", "hesper"))
    assert hesper == world + 1 and lines[hesper].index("hesper") > lines[world].index("world")
    assert "2.0 KiB, 2 min old, used 80 s ago" in lines[world]
    assert "on gone" in next(line for line in lines if "cc" in line)


def test_tree_keeps_the_last_used() -> None:
    text = text_of(show.context_tree([context(f"c{i}", used=float(i)) for i in range(10)], 20.0, 4))
    assert [word for i in range(10) if (word := f"c{i}") in text] == ["c6", "c7", "c8", "c9"]
    assert "and 6 more" in text
    assert "no contexts" in text_of(show.context_tree([], 0.0, 4))


def test_names_cannot_command_the_terminal() -> None:
    bad = "\x1b]0;owned\x07[bold]\x9b2J\r\n"
    shown = [
        show.context_tree([context("aa", name=bad)], 20.0, 4),
        show.contexts([context("aa", name=bad)]),
        show.story([StoryEvent(1.0, bad, {bad: bad})]),
        show.stats(msgspec.structs.replace(STATS, requests={bad: 1})),
    ]
    for what in shown:
        text = text_of(what)
        assert not {c for c in text if c != "\n" and not c.isprintable()}
        assert "[bold]" in text and "\\x1b" in text


def test_story_tells_the_time_between() -> None:
    text = text_of(show.story([StoryEvent(1.0, "received", {"op": "score"}), StoryEvent(1.25, "assigned", {"worker": "w0"})]))
    assert "received" in text and "op=score" in text and "+250.0 ms" in text and "worker=w0" in text


def test_words() -> None:
    assert [show.bytes_words(n) for n in (0, 1023, 1024, 1536 << 20, 1 << 50)] == [
        *("0 B", "1023 B", "1.0 KiB", "1.5 GiB", "1024.0 TiB")
    ]
    assert [show.seconds_words(s) for s in (-1, 5.4, 120, 7200, 200_000)] == ["0 s", "5 s", "2 min", "2.0 h", "2.3 d"]


def test_all_names_of_a_context_are_listed() -> None:
    named = msgspec.structs.replace(context("aa", name="b"), names=("a", "b"))
    for shown in (show.contexts([named]), show.context_tree([named], 20.0, 4)):
        assert "a, b" in text_of(shown)

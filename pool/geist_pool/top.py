"""`geist-pool top`: what a pool does now. Rates are differences of two `stats`, divided by the time between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.text import Text

from geist_pool import show
from geist_pool.client import Client
from geist_pool.errors import GeistPoolError, NoAnswer
from geist_pool.protocol import ContextInfo, StatsResult

CONTEXTS_SHOWN: Final = 30
TOKEN_KINDS: Final = ("reused", "prefilled", "generated")


class Sample(Struct, frozen=True):
    """One look at the pool. at: monotonic seconds."""

    at: float
    stats: StatsResult
    contexts: Sequence[ContextInfo]


class Rates(Struct, frozen=True):
    """Per second."""

    requests: float
    errors: float
    reused: float
    prefilled: float
    generated: float
    passes: float


def rates(before: Sample, after: Sample) -> Rates | None:
    """None where they cannot be told: no time between them, or the broker began anew and its counters with it."""
    a, b, seconds = before.stats, after.stats, after.at - before.at
    if seconds <= 0 or b.uptime_s < a.uptime_s:
        return None
    counts = ((sum(s.requests.values()), sum(s.errors.values()), *_tokens(s), s.passes) for s in (a, b))
    first, second = counts
    return Rates(*((y - x) / seconds for x, y in zip(first, second, strict=True)))


def _tokens(s: StatsResult) -> tuple[int, ...]:
    return tuple(getattr(s, f"tokens_{kind}") for kind in TOKEN_KINDS)


def frame(sample: Sample, per_second: Rates | None, *, title: str, now: float) -> RenderableType:
    """One picture of the pool. now: Unix seconds."""
    s = sample.stats
    held, slots = sum(w.busy for w in s.fleet), sum(w.slots for w in s.fleet)
    share = f"{100 * s.store_bytes / s.store_limit:.0f} %" if s.store_limit else "-"
    rows = [
        ("up", show.seconds_words(s.uptime_s)),
        ("requests", f"{s.requests_active} active, {s.queue} waiting, {sum(s.errors.values())} errors so far"),
        ("slots", f"{held} of {slots} taken, {s.workers_busy} of {s.workers} workers busy, {s.workers_lost} lost so far"),
        ("memory", f"{show.bytes_words(s.store_bytes)} of {show.bytes_words(s.store_limit)} ({share}), {s.evictions} evictions"),
    ]
    if per_second is None:
        rows.append(("per second", "-"))
    else:
        r = per_second
        words = f"{r.requests:.1f} requests, {r.errors:.1f} errors, {r.passes:.1f} passes"
        rows.append(("per second", f"{words}; tokens: " + ", ".join(f"{getattr(r, k):.1f} {k}" for k in TOKEN_KINDS)))
    heads = ("worker", "pid", "slots", "jobs", "passes", "prefilled", "generated", "mapped", "resident", "private")
    fleet = [
        (
            *(w.worker, w.pid, f"{w.busy}/{w.slots}", w.jobs_done, w.passes, w.tokens_prefilled, w.tokens_generated),
            *(w.contexts_mapped, show.bytes_words(w.rss_bytes), show.bytes_words(w.private_bytes)),
        )
        for w in sorted(s.fleet, key=lambda w: w.worker)
    ]
    return Group(
        Rule(show.plain(title), align="left"),
        show.facts(rows),
        Rule(style="dim"),
        show.grid(heads, fleet),
        Rule(style="dim"),
        show.context_tree(sample.contexts, now, CONTEXTS_SHOWN),
    )


def take(client: Client) -> Sample:
    """Raises what the client raises."""
    return Sample(time.monotonic(), client.stats(), client.contexts())


def run(client: Client, console: Console, *, interval: float, once: bool, sleep: Callable[[float], None] = time.sleep) -> None:
    """Shows one frame every `interval` seconds until it is interrupted; with `once`, or where nobody sees it move, one in all.

    Raises NoAnswer where there is no pool at the start; later it waits for one to come back.
    """
    title = f"pool at {client.address}, space {client.space}"
    before = take(client)
    if once or not console.is_terminal:
        sleep(interval)
        after = take(client)
        console.print(frame(after, rates(before, after), title=title, now=time.time()))
        return
    with Live(frame(before, None, title=title, now=time.time()), console=console, auto_refresh=False, screen=True) as live:
        last: Sample | None = before
        while True:
            sleep(interval)
            try:
                after = take(client)
            except NoAnswer as e:
                last = None
                live.update(Text(str(e), style="bold red"), refresh=True)
                continue
            except GeistPoolError as e:
                live.update(Text(str(e), style="bold red"), refresh=True)
                continue
            live.update(frame(after, rates(last, after) if last else None, title=title, now=time.time()), refresh=True)
            last = after

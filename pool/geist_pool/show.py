"""What the commands print: tables and trees made from answers of the pool. Values in, something that rich prints out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from geist_pool.cached import Model, Packed
from geist_pool.protocol import ContextInfo, SavedInfo, StatsResult, StoryEvent

UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def plain(text: object) -> Text:
    """As it is, without markup; what a terminal would obey is shown as its code: names come from whoever uses the pool."""
    return Text("".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text)))


def bytes_words(n: float) -> str:
    """E.g. 12.3 MiB."""
    unit = 0
    while abs(n) >= 1024 and unit < len(UNITS) - 1:
        n /= 1024
        unit += 1
    return f"{n:.0f} B" if unit == 0 else f"{n:.1f} {UNITS[unit]}"


def seconds_words(s: float) -> str:
    """E.g. 4 s, 12 min, 3.5 h, 2.0 d."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min")):
        if s < limit:
            return f"{max(0.0, s) / unit:.0f} {name}"
    return f"{s / 3600:.1f} h" if s < 48 * 3600 else f"{s / 86400:.1f} d"


def facts(rows: Iterable[tuple[str, object]]) -> Table:
    """Names and values, one a line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, plain(value))
    return table


def grid(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(*heads, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(plain, row))
    return table


def stats(found: StatsResult) -> RenderableType:
    """Everything in it: single values, then spaces and workers as tables."""
    values: dict[str, Any] = msgspec.to_builtins(found)
    parts: list[RenderableType] = [
        facts((name, _shown(value)) for name, value in values.items() if name not in ("type", "spaces", "fleet"))
    ]
    for head, rows in (
        ("space", [{"space": name, **of} for name, of in sorted(values["spaces"].items())]),
        ("worker", list(values["fleet"])),
    ):
        if rows:
            parts += ["", grid([head, *(k for k in rows[0] if k != head)], [list(r.values()) for r in rows])]
    return Group(*parts)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items()) or "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def contexts(found: Iterable[ContextInfo]) -> Table:
    """Oldest first."""
    heads = ("name", "id", "tokens", "bytes", "parent", "leases", "pinned")
    order = sorted(found, key=lambda c: (c.created, c.id))
    rows = [(_names(c) or "-", c.id, c.n_tokens, c.bytes, c.parent or "-", c.leases, "yes" if c.pinned else "-") for c in order]
    return grid(heads, rows)


def context_tree(found: Iterable[ContextInfo], now: float, most: int) -> RenderableType:
    """Contexts under those they continue, the `most` last used of them; now: Unix seconds."""
    everything = sorted(found, key=lambda c: (-c.last_used, c.id))
    shown = {c.id: c for c in everything[:most]}
    root = Tree("", hide_root=True)
    nodes: dict[str, Tree] = {}

    def node(c: ContextInfo, depth: int = 0) -> Tree:
        if c.id not in nodes:
            parent = shown.get(c.parent or "") if depth < 100 else None
            above = root if parent is None else node(parent, depth + 1)
            nodes[c.id] = above.add(_context_line(c, now, orphan=parent is None and c.parent is not None))
        return nodes[c.id]

    for c in sorted(shown.values(), key=lambda c: (c.created, c.id)):
        node(c)
    if not shown:
        return Text("no contexts", style="dim")
    left = len(everything) - len(shown)
    return Group(root, Text(f"and {left} more", style="dim")) if left else root


def _names(c: ContextInfo) -> str:
    """All of them; older brokers tell only the last one."""
    return ", ".join(c.names) or c.name or ""


def _context_line(c: ContextInfo, now: float, *, orphan: bool) -> Text:
    line = plain(_names(c) or c.id)
    line.stylize("bold")
    words = [f"{c.n_tokens} tokens", bytes_words(c.bytes), f"{seconds_words(now - c.created)} old"]
    words.append(f"used {seconds_words(now - c.last_used)} ago")
    words += [f"{c.leases} leases"] if c.leases else []
    words += ["pinned"] if c.pinned else []
    words += [f"expires in {seconds_words(c.expires - now)}"] if c.expires is not None else []
    words += [f"on {c.parent}"] if orphan else []
    return line.append("  " + ", ".join(words), style="not bold")


def saved(found: Iterable[SavedInfo]) -> Table:
    rows = [(s.saved, s.n_tokens, s.bytes, _when(s.written), s.fingerprint[:16]) for s in sorted(found, key=lambda s: s.saved)]
    return grid(("saved", "tokens", "bytes", "written", "model"), rows)


def story(events: Iterable[StoryEvent]) -> Table:
    """Oldest first, each with the milliseconds since the one before."""
    rows, last = [], None
    for e in events:
        since = "" if last is None else f"+{(e.at - last) * 1000:.1f} ms"
        rows.append((_when(e.at, "milliseconds"), since, e.what, " ".join(f"{k}={v}" for k, v in e.fields.items())))
        last = e.at
    return grid(("at (UTC)", "since", "what", ""), rows)


def models(known: Iterable[Model], packed: Sequence[Packed]) -> RenderableType:
    listed = list(known)
    names = {m.fingerprint[:32]: m.name for m in listed if m.fingerprint is not None}
    rows = [(m.name, bytes_words(m.n_bytes), "yes" if m.path else "no", (m.fingerprint or "-")[:32], m.about) for m in listed]
    parts: list[RenderableType] = [grid(("model", "size", "fetched", "fingerprint", ""), rows)]
    if packed:
        found = [(p.fingerprint, names.get(p.fingerprint, "-"), bytes_words(p.n_bytes), p.layout, p.numerics) for p in packed]
        parts += ["", grid(("packed weights", "of", "size", "layout", "numerics"), found)]
    return Group(*parts)


def _when(at: float, precision: str = "seconds") -> str:
    return datetime.fromtimestamp(at, UTC).replace(tzinfo=None).isoformat(" ", precision)

"""What the command line shows a person: a console that is plain where nobody looks, and a bar for downloads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from geist_pool import downloads, models

if TYPE_CHECKING:  # a server shows something once it runs, and should not wait for this before
    from rich.console import Console
    from rich.progress import TaskID


def console(*, stderr: bool = False) -> Console:
    """A console; without a terminal it writes no colours and does not wrap below 120 columns."""
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=max(120, found.width))


def say(words: str, style: str | None = None) -> None:
    """A line on stderr, its words as they are."""
    from rich.text import Text

    console(stderr=True).print(Text(words), style=style, soft_wrap=True)


def say_error(words: str) -> None:
    """An error on stderr, its words as they are."""
    from rich.text import Text

    console(stderr=True).print(Text.assemble(("error:", "bold red"), " ", words), soft_wrap=True)


@contextmanager
def download_bar(name: str) -> Iterator[downloads.Progress]:
    """A progress bar on stderr while the block runs; without a terminal one line a step."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    out = console(stderr=True)
    if not out.is_terminal:
        seen: set[str] = set()

        def plain(what: str, _done: int, _total: int) -> None:
            if what not in seen:
                seen.add(what)
                out.print(f"{what} {name}")

        yield plain
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(f"{what} {name}", total=total or None)
            bar.update(tasks[what], completed=done, total=total or None)

        yield report


def pull(name: str, cache_dir: Path) -> Path:
    """Fetches a model of the catalogue or the hub with a bar unless it is there; returns its path. Raises DownloadError."""
    source = models.CATALOGUE.get(name)
    if source is not None and source.terms and not models.model_path(name, cache_dir).is_file():
        console(stderr=True).print(source.terms, soft_wrap=True)
    with download_bar(name) as report:
        return models.pull(name, cache_dir, progress=report)

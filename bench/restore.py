"""How long it takes to bring a context back, beside computing it anew and beside copying as many bytes.

    python -m bench.restore [--model PATH.gguf] [--tokens 100,700,2000] [--quick]

One process, one session a side; all sides of a length take turns. Images and blocks for `attach` lie in real shared memory, made
by the store as a worker makes them. That every way leads to the same logits, bit for bit, is checked in every round.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np

from bench.contexts import Mapped, Shelf, prose, touched
from bench.harness import (
    Book,
    Check,
    Clock,
    Spread,
    Turn,
    arguments,
    fetched_model,
    finish,
    interleave,
    machine_facts,
    run,
    show_progress,
)
from bench.work import pass_macs
from geist_pool.engine import Engine, Image, Model, Session
from geist_pool.protocol import ContextRef
from geist_pool.text.tokenizer import Tokenizer

DEFAULT_TOKENS = (100, 700, 2000)
QUICK_TOKENS = (700,)
REPEATS, QUICK_REPEATS = 15, 3
PREFILLED_EACH_ROUND: Final = 1000  # tokens; a longer context is prefilled once, before the rounds
ONCE: Final = "prefill, once"


class Sides:
    """All ways to the state behind `tokens`, as turns."""

    default_tokens: Sequence[int] = DEFAULT_TOKENS
    quick_tokens: Sequence[int] = QUICK_TOKENS
    ratios: Sequence[tuple[str, str]] = (
        ("prefill", "attach"),
        ("prefill", "flat restore"),
        ("flat restore", "memcpy, flat bytes"),
        ("flat restore", "memcpy to new memory"),
        ("flat snapshot", "memcpy, flat bytes"),
        ("publish in shared memory", "memcpy, flat bytes"),
        ("publish in shared memory", "memcpy to new memory"),
        ("flat restore", "attach"),
        ("decode after attach", "decode after prefill"),
        ("decode after restore", "decode after prefill"),
        ("decode after attach", "decode after restore"),
        ("decode after fork", "decode after prefill"),
    )

    def __init__(self, model: Model, tokens: np.ndarray[Any, np.dtype[np.int32]], shelf: Shelf, stack: ExitStack) -> None:
        self.tokens = tokens
        self.next_token = int(tokens[0])
        self.wrong = self.compared = 0
        n_ctx = len(tokens) + 1
        self.live = stack.enter_context(Session(model, n_ctx=n_ctx))  # stays behind the tokens
        self.work = stack.enter_context(Session(model, n_ctx=n_ctx))  # goes there anew in each turn
        start = time.perf_counter()
        self.live.prefill(tokens)
        self.prefilled_s = time.perf_counter() - start
        with self.live.fork() as fork:
            fork.decode(self.next_token)
            self.expected = fork.logits().tobytes()
        self.flat = touched(self.live.snapshot_size)
        self.flat_other = touched(self.live.snapshot_size)
        self.thin = touched(self.live.snapshot_thin_size)
        self.live.snapshot(self.flat)
        self.shelf = shelf
        self.ref = shelf.publish(self.live)
        stack.callback(shelf.drop, self.ref)
        self.mapped = Mapped(self.ref)
        stack.callback(self.mapped.close)
        stack.callback(self.work.reset)  # before the mapping goes
        Image.verify(self.mapped.image, self.mapped.kv)

    def turns(self) -> list[Turn]:
        return [
            self.nothing, *self.prefills(), self.snapshot, self.copy, self.copy_new, self.restore, self.snapshot_thin,
            self.attach, self.fork, self.through_new_object,
        ]  # fmt: skip

    def prefills(self) -> list[Turn]:
        """Prefill as a turn, unless it would take most of the run."""
        return [self.prefill] if len(self.tokens) <= PREFILLED_EACH_ROUND else []

    def nothing(self, clock: Clock) -> None:
        with clock("nothing (the clock itself)"):
            pass

    def prefill(self, clock: Clock) -> None:
        self.work.reset()
        with clock("prefill"):
            self.work.prefill(self.tokens)
        self._decode(clock, self.work, "decode after prefill")

    def snapshot(self, clock: Clock) -> None:
        with clock("flat snapshot"):
            self.live.snapshot(self.flat)

    def copy(self, clock: Clock) -> None:
        source, target = np.frombuffer(self.flat, np.uint8), np.frombuffer(self.flat_other, np.uint8)
        with clock("memcpy, flat bytes"):
            np.copyto(target, source)

    def copy_new(self, clock: Clock) -> None:
        """What a restore cannot avoid where its blocks are new memory: the kernel's work of giving it."""
        source = np.frombuffer(self.flat, np.uint8)
        with mmap.mmap(-1, len(source)) as memory:
            target = np.frombuffer(memory, np.uint8)
            with clock("memcpy to new memory"):
                np.copyto(target, source)
            del target  # lets the mapping close

    def restore(self, clock: Clock) -> None:
        self.work.reset()
        with clock("flat restore"):
            self.work.restore(self.flat)
        self._decode(clock, self.work, "decode after restore")

    def snapshot_thin(self, clock: Clock) -> None:
        with clock("thin snapshot"):
            self.live.snapshot_thin(self.thin)

    def attach(self, clock: Clock) -> None:
        """As in a worker that continued a context just before: the session has its memory, and the caches hold other things."""
        self.work.reset()
        self.work.attach(self.mapped.image, self.mapped.kv)
        self.work.decode(self.next_token)
        self.work.reset()
        with clock("attach"):
            self.work.attach(self.mapped.image, self.mapped.kv)
        self._decode(clock, self.work, "decode after attach")
        self.work.reset()

    def fork(self, clock: Clock) -> None:
        with clock("fork"):
            fork = self.live.fork()
        try:
            self._decode(clock, fork, "decode after fork")
        finally:
            fork.close()

    def through_new_object(self, clock: Clock) -> None:
        """A context as it comes into the world: made by one, seen by another for the first time."""
        ref = self.shelf.publish(self.live, clock)
        try:
            self._map_and_attach(clock, ref)
        finally:
            self.shelf.drop(ref)

    def _map_and_attach(self, clock: Clock, ref: ContextRef) -> None:
        with clock("first mapping"):
            mapped = Mapped(ref)
        try:
            with clock("verify"):
                Image.verify(mapped.image, mapped.kv)
            self.work.reset()
            with clock("attach, first"):
                self.work.attach(mapped.image, mapped.kv)
            self._decode(clock, self.work, "decode after attach, first")
            self.work.reset()
        finally:
            mapped.close()

    def _decode(self, clock: Clock, session: Session, name: str) -> None:
        with clock(name):
            session.decode(self.next_token)
        self.compared += 1
        self.wrong += session.logits().tobytes() != self.expected

    def stands_for(self, model: Model) -> dict[str, dict[str, int]]:
        """What each time stands for, in the order of the table."""
        n = len(self.tokens)
        tensors = model.gguf.tensors()
        pass_, step = pass_macs(model.info, tensors, n), pass_macs(model.info, tensors, 1, before=n)
        flat, thin = {"bytes": len(self.flat)}, {"bytes": len(self.thin)}
        stored, usable = {"bytes": self.ref.image_bytes + self.ref.kv_bytes}, {"state_bytes": len(self.flat)}
        decode = {"tokens": 1, "macs": step}
        return {
            "nothing (the clock itself)": {},
            "prefill": {"tokens": n, "macs": pass_},
            ONCE: {"tokens": n, "macs": pass_},
            "flat snapshot": flat,
            "flat restore": flat,
            "memcpy, flat bytes": flat,
            "memcpy to new memory": flat,
            "thin snapshot": thin,
            "publish in shared memory": stored,
            "first mapping": usable,
            "verify": flat,
            "attach, first": usable,
            "attach": usable,
            "fork": usable,
            "decode after prefill": decode,
            "decode after restore": decode,
            "decode after attach": decode,
            "decode after attach, first": decode,
            "decode after fork": decode,
        }


def add(book: Book, group: str, sides: Sides, samples: dict[str, list[float]], model: Model) -> None:
    """Rows and ratios of one length, as far as they were measured."""
    if "prefill" not in samples:
        samples = samples | {ONCE: [sides.prefilled_s]}
    book.add(group, samples, {name: work for name, work in sides.stands_for(model).items() if name in samples})
    for over, under in sides.ratios:
        if over in samples and under in samples:
            book.ratio(group, over, under)


def facts_of(book: Book, group: str, sides: Sides) -> dict[str, Any]:
    """The figures that have a bar, of one length; _at_N says its tokens. A share is of memcpy's bytes a second."""
    medians = {row.name: row.seconds.median for row in book.rows if row.group == group}
    pairs = {(r.over, r.under): r.pairs.median for r in book.ratios if r.group == group}
    facts: dict[str, Any] = {"attach_us": 1e6 * medians["attach"]}
    for before in ("prefill", "restore"):
        if (ratio := pairs.get(("decode after attach", f"decode after {before}"))) is not None:
            facts[f"first_pass_after_attach_over_{before}"] = ratio
    for what in ("restore", "snapshot"):
        if (ratio := pairs.get((f"flat {what}", "memcpy, flat bytes"))) is not None:
            facts[f"flat_{what}_share_of_memcpy"] = 1 / ratio
    if (ratio := pairs.get(("publish in shared memory", "memcpy, flat bytes"))) is not None:
        facts["publish_over_memcpy"] = ratio
        facts["publish_over_memcpy_to_new_memory"] = pairs["publish in shared memory", "memcpy to new memory"]
    steps = (book.row(group, name).samples for name in ("first mapping", "verify"))
    mapping = Spread.of(sum(both) for both in zip(*steps, strict=True)).median
    stored = sides.ref.image_bytes + sides.ref.kv_bytes
    facts["first_mapping_ms_per_10mb"] = 1e3 * mapping * 1e7 / stored
    facts["stored_bytes"] = stored
    return {f"{name}_at_{len(sides.tokens)}": value for name, value in facts.items()}


@contextmanager
def opened(args: Any) -> Iterator[Model]:
    """The model, on an engine of its own."""
    path, cache = fetched_model(args.model, args.cache_dir)
    with Engine(args.tier, args.threads) as engine, Model(engine, path, cache_dir=cache) as model:
        yield model


def lengths(text: str | None, default: Sequence[int], n_ctx: int) -> list[int]:
    """The lengths to measure. Raises ValueError for one that the model cannot take and that was asked for by name."""
    if text is None:
        return [n for n in default if n + 1 <= n_ctx]
    chosen = [int(word) for word in text.split(",")]
    if not chosen or min(chosen) < 1 or max(chosen) + 1 > n_ctx:
        raise ValueError(f"lengths are 1 to {n_ctx - 1} tokens for this model, not {text}")
    return chosen


def measure(args: argparse.Namespace, parser: argparse.ArgumentParser, bench: str, kind: type[Sides]) -> int:
    """The whole of a run: all lengths, each with the sides of that kind. Returns the exit status."""
    started, machine = time.time(), machine_facts()
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    book, checks = Book(), []
    facts: dict[str, Any] = {}
    with opened(args) as model:
        tokenizer = Tokenizer(model.vocabulary())
        default = kind.quick_tokens if args.quick else kind.default_tokens
        try:
            chosen = lengths(args.tokens, default, model.info.n_ctx_train)
        except ValueError as error:
            parser.error(str(error))
        for n in chosen:
            group = f"{n} tokens"
            with ExitStack() as stack:
                shelf = stack.enter_context(Shelf(model, model.geometry()))
                sides = kind(model, prose(tokenizer, n), shelf, stack)
                samples = interleave(sides.turns(), repeats, progress=show_progress(group))
                add(book, group, sides, samples, model)
                facts |= facts_of(book, group, sides)
                what = f"{group}: logits after every way equal those of one prefill, bit for bit"
                checks.append(Check(what=what, n=sides.compared, failed=sides.wrong))
                facts |= {f"flat_bytes_at_{n}": len(sides.flat), f"thin_bytes_at_{n}": len(sides.thin)}
        info = model.info
        subject = {
            "model": model.path.name,
            "architecture": info.architecture,
            "fingerprint": model.fingerprint[:16],
            "params": info.n_params,
        }
        settings = {"tier": model.engine.tier, "threads": args.threads, "kv": "f16", "repeats": repeats}
        facts |= {"kv_bytes_per_token": info.kv_bytes_per_token, "recurrent_bytes": info.recurrent_bytes}
        name = f"{bench}-{model.path.stem.lower()}"
    return finish(args, name, started, machine, book, subject=subject, settings=settings, checks=checks, facts=facts)


def with_lengths(about: str, kind: type[Sides]) -> argparse.ArgumentParser:
    """The options of every bench, and --tokens."""
    parser = arguments(about)
    default = ",".join(map(str, kind.default_tokens))
    parser.add_argument("--tokens", help=f"lengths, separated by commas; default {default} as far as the model takes them")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = with_lengths(__doc__ or "", Sides)
    return measure(parser.parse_args(argv), parser, "restore", Sides)


if __name__ == "__main__":
    sys.exit(run(main))

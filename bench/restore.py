"""How long it takes to bring a context back, beside computing it anew and beside copying as many bytes.

    python -m bench.restore [--model PATH.gguf] [--tokens 100,700,2000] [--quick]

One process, one session a side; all sides of a length take turns. Images and blocks for `attach` lie in real shared memory, made
by the store as a worker makes them. That every way leads to the same logits, bit for bit, is checked in every round.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from bench.harness import (
    Book,
    Check,
    Clock,
    arguments,
    fetched_model,
    finish,
    interleave,
    machine_facts,
    run,
    show_progress,
)
from bench.work import pass_macs
from geist_pool.demo.world import CONTEXT_TEXT
from geist_pool.engine import NUMERICS, Engine, Image, Model, Session
from geist_pool.protocol import ContextRef, Envelope, Geometry
from geist_pool.store import layout, names, shm
from geist_pool.text.tokenizer import Tokenizer

DEFAULT_TOKENS = (100, 700, 2000)
QUICK_TOKENS = (700,)
REPEATS, QUICK_REPEATS = 15, 3


def prose(tokenizer: Tokenizer, n: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The demo's context as ids, over and over: int32[n]. Times do not depend on the words."""
    ids = tokenizer.encode(CONTEXT_TEXT, special=False)
    return np.resize(np.array(ids, np.int32), n)


def touched(n: int) -> memoryview:
    """`n` bytes of page-aligned memory that is really there."""
    view = memoryview(mmap.mmap(-1, max(n, 1)))
    np.frombuffer(view, np.uint8)[:] = 1
    return view[:n]


class Shelf:
    """Contexts in shared memory under a pool's name of our own; removes them all in the end."""

    def __init__(self, model: Model, geometry: Geometry) -> None:
        self.pool = f"bench-{os.getpid()}"
        self._model = model
        self._geometry = geometry
        self._count = 0

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *_: object) -> None:
        for found in shm.list_objects(self.pool):
            shm.unlink(found.name)

    def publish(self, session: Session, clock: Clock | None = None) -> ContextRef:
        """Publishes the session's state as a new context: create, reserve, fill, seal. Timed as "publish" if there is a clock."""
        self._count += 1
        context, n = f"{self._count:012x}", session.position
        envelope = Envelope(
            id=context,
            name="bench",
            space="default",
            parent=None,
            created=0.0,
            ttl_s=None,
            pin=False,
            n_tokens=n,
            first_block=0,
            n_blocks=layout.whole_blocks(n),
        )
        kv_bytes = layout.kv_object_bytes(self._geometry, envelope.n_blocks)
        ref = ContextRef(
            id=context,
            image=names.image_name(self.pool, context),
            image_bytes=layout.image_object_bytes(self._geometry, n, envelope),
            kv=names.kv_name(self.pool, context) if kv_bytes else None,
            kv_bytes=kv_bytes,
            first_block=0,
            n_blocks=envelope.n_blocks,
            n_tokens=n,
        )
        with clock("publish in shared memory") if clock is not None else ExitStack():
            self._fill(session, ref, envelope)
        return ref

    def _fill(self, session: Session, ref: ContextRef, envelope: Envelope) -> None:
        with shm.Publication(
            ref, envelope, self._geometry, pool=self.pool, fingerprint=self._model.fingerprint, numerics=NUMERICS
        ) as publication:
            if publication.kv is not None:
                session.snapshot_blocks(0, ref.n_blocks, publication.kv)
            session.snapshot_thin(publication.image)
            publication.seal()

    def drop(self, ref: ContextRef) -> None:
        """Removes the objects' names."""
        for name in (ref.image, ref.kv):
            if name is not None:
                shm.unlink(name)


class Mapped:
    """A published context, mapped read-only: `image` and the areas `kv`, as a session attaches to them."""

    def __init__(self, ref: ContextRef) -> None:
        self._image = shm.Mapping(ref.image, ref.image_bytes)
        self._kv = shm.Mapping(ref.kv, ref.kv_bytes) if ref.kv is not None else None
        self.image = self._image.view[layout.parse(self._image.view, what=ref.image).image_offset :]
        self.kv = (self._kv.view,) if self._kv is not None else ()

    def close(self) -> None:
        """Unmaps; no session may be attached any more."""
        self.image.release()
        self._image.close()
        if self._kv is not None:
            self._kv.close()


class Sides:
    """All ways to the state behind `tokens`, as turns."""

    def __init__(self, model: Model, tokens: np.ndarray[Any, np.dtype[np.int32]], shelf: Shelf, stack: ExitStack) -> None:
        self.tokens = tokens
        self.next_token = int(tokens[0])
        self.wrong = self.compared = 0
        n_ctx = len(tokens) + 1
        self.live = stack.enter_context(Session(model, n_ctx=n_ctx))  # stays behind the tokens
        self.work = stack.enter_context(Session(model, n_ctx=n_ctx))  # goes there anew in each turn
        self.live.prefill(tokens)
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

    def turns(self) -> list[Any]:
        return [
            self.nothing, self.prefill, self.snapshot, self.copy, self.copy_new, self.restore, self.snapshot_thin, self.attach,
            self.fork, self.through_new_object,
        ]  # fmt: skip

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
        finally:
            self.shelf.drop(ref)

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


RATIOS = (
    ("prefill", "attach"),
    ("prefill", "flat restore"),
    ("flat restore", "memcpy, flat bytes"),
    ("flat restore", "memcpy to new memory"),
    ("flat snapshot", "memcpy, flat bytes"),
    ("publish in shared memory", "memcpy to new memory"),
    ("flat restore", "attach"),
    ("decode after attach", "decode after prefill"),
    ("decode after restore", "decode after prefill"),
    ("decode after fork", "decode after prefill"),
)


@contextmanager
def opened(args: Any) -> Iterator[Model]:
    """The model, on an engine of its own."""
    path, cache = fetched_model(args.model, args.cache_dir)
    with Engine(args.tier, args.threads) as engine, Model(engine, path, cache_dir=cache) as model:
        yield model


def lengths(text: str | None, quick: bool, n_ctx: int) -> list[int]:
    """The lengths to measure. Raises ValueError for one that the model cannot take and that was asked for by name."""
    if text is None:
        return [n for n in (QUICK_TOKENS if quick else DEFAULT_TOKENS) if n + 1 <= n_ctx]
    chosen = [int(word) for word in text.split(",")]
    if not chosen or min(chosen) < 1 or max(chosen) + 1 > n_ctx:
        raise ValueError(f"lengths are 1 to {n_ctx - 1} tokens for this model, not {text}")
    return chosen


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", help="lengths, separated by commas; default 100,700,2000 as far as the model takes them")
    args = parser.parse_args(argv)
    started, machine = time.time(), machine_facts()
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    book, checks = Book(), []
    with opened(args) as model:
        tokenizer = Tokenizer(model.vocabulary())
        geometry = model.geometry()
        sizes: dict[str, int] = {}
        try:
            chosen = lengths(args.tokens, args.quick, model.info.n_ctx_train)
        except ValueError as error:
            parser.error(str(error))
        for n in chosen:
            group = f"{n} tokens"
            with ExitStack() as stack:
                shelf = stack.enter_context(Shelf(model, geometry))
                sides = Sides(model, prose(tokenizer, n), shelf, stack)
                samples = interleave(sides.turns(), repeats, progress=show_progress(group))
                book.add(group, samples, sides.stands_for(model))
                for over, under in RATIOS:
                    book.ratio(group, over, under)
                what = f"{group}: logits after every way equal those of one prefill, bit for bit"
                checks.append(Check(what=what, n=sides.compared, failed=sides.wrong))
                sizes |= {f"flat_bytes_at_{n}": len(sides.flat), f"thin_bytes_at_{n}": len(sides.thin)}
        info = model.info
        subject = {
            "model": model.path.name,
            "architecture": info.architecture,
            "fingerprint": model.fingerprint[:16],
            "params": info.n_params,
        }
        settings = {"tier": model.engine.tier, "threads": args.threads, "kv": "f16", "repeats": repeats}
        facts = {"kv_bytes_per_token": info.kv_bytes_per_token, "recurrent_bytes": info.recurrent_bytes, **sizes}
        bench = f"restore-{model.path.stem.lower()}"
    return finish(args, bench, started, machine, book, subject=subject, settings=settings, checks=checks, facts=facts)


if __name__ == "__main__":
    sys.exit(run(main))

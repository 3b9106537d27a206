"""Contexts in real shared memory, made by the store as a worker makes them, for benchmarks without a pool."""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack
from typing import Any

import numpy as np

from bench.harness import Clock
from geist_pool.demo.world import CONTEXT_TEXT
from geist_pool.engine import NUMERICS, Model, Session
from geist_pool.protocol import ContextRef, Envelope, Geometry
from geist_pool.store import layout, names, shm
from geist_pool.text.tokenizer import Tokenizer


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

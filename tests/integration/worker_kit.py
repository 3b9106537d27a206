"""What the tests of real worker processes share: prompts, work, the measure, and a look at published bytes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from geist_pool import protocol as p
from geist_pool.engine import Model, Session
from geist_pool.store import layout, shm


def ids(n: int, seed: int = 0) -> tuple[int, ...]:
    """n token ids of the tiny models."""
    return tuple(np.random.default_rng(seed).integers(3, 500, n).tolist())


def generate(tokens: tuple[int, ...], max_tokens: int = 8, **changes: object) -> p.GenerateWork:
    """Work: that many tokens, greedily, with log-probabilities, unless changed."""
    base = p.GenerateWork(
        tokens=tokens, max_tokens=max_tokens, sampling=p.Sampling(seed=1), stop=(), eog=(), stream=False, logprobs=2
    )
    return msgspec.structs.replace(base, **changes)


def expected(model: Model, prompt: tuple[int, ...], n: int = 8, sampling: p.Sampling | None = None) -> list[int]:
    """What a fresh session gives that prefills everything."""
    with Session(model) as session:
        session.prefill(prompt)
        session.set_sampler(sampling or p.Sampling())
        out: list[int] = []
        for _ in range(n):
            out.append(session.sample())
            session.decode(out[-1])
        return out


def published(ref: p.ContextRef) -> tuple[bytes, bytes]:
    """The engine's part of a context's objects: image and blocks."""
    with shm.Mapping(ref.image, ref.image_bytes) as mapped:
        image = bytes(mapped.view[layout.parse(mapped.view, what=ref.image).image_offset :])
    if ref.kv is None:
        return image, b""
    with shm.Mapping(ref.kv, ref.kv_bytes) as mapped:
        return image, bytes(mapped.view)


def drop(chain: p.Chain) -> None:
    """Unlinks all objects of the chain."""
    for ref in chain:
        shm.unlink(ref.image)
        if ref.kv is not None:
            shm.unlink(ref.kv)


def mapped_names(pid: int) -> list[str]:
    """The lines of a process's maps that are pools' objects."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/gp-" in line]

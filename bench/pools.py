"""A pool that a benchmark starts and stops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from geist_pool.config import PoolConfig, store_key
from geist_pool.engine import Engine
from geist_pool.store import shm
from geist_pool.supervisor import Programs, Supervisor


@contextmanager
def running(model: Path, cache: Path, *, programs: Programs | None = None, **settings: Any) -> Iterator[Supervisor]:
    """A pool of a name of our own, with these settings of `PoolConfig`. Raises RuntimeError if it leaves something behind."""
    quiet = {"log_level": "warning"} | settings
    config = PoolConfig(name=f"bench-{os.getpid()}", model=str(model), cache_dir=str(cache), **quiet)
    with Supervisor(config, programs=programs) as pool:
        yield pool
    if left := shm.list_objects(store_key(config.name)):
        raise RuntimeError(f"the pool left {len(left)} objects in shared memory")


def effective_tier(tier: str) -> str:
    """What "auto" means on this machine."""
    with Engine(tier) as engine:
        return engine.tier

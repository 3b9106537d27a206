"""What a worker counts, and what memory it has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from geist_pool.protocol import Pong

INTERVAL_S: Final = 1.0  # walking the page tables of a large model takes milliseconds
_ROLLUP: Final = Path("/proc/self/smaps_rollup")


class Gauges:
    """Counters since the start of the process; jobs add to them."""

    def __init__(self) -> None:
        self.passes = 0
        self.tokens_prefilled = 0
        self.tokens_generated = 0  # drawn or scored
        self._memory = (0, 0)
        self._read_at = -INTERVAL_S

    def pong(self, n: int, contexts_mapped: int) -> Pong:
        """The answer to a ping. Memory is at most INTERVAL_S old; 0 where the kernel does not tell it."""
        now = time.monotonic()
        if now - self._read_at >= INTERVAL_S:
            self._read_at = now
            self._memory = memory()
        rss, private = self._memory
        return Pong(
            n,
            passes=self.passes,
            tokens_prefilled=self.tokens_prefilled,
            tokens_generated=self.tokens_generated,
            contexts_mapped=contexts_mapped,
            rss_bytes=rss,
            private_bytes=private,
        )


def memory() -> tuple[int, int]:
    """Resident bytes of this process, and how many of them are its own alone; zeros where the kernel does not tell."""
    try:
        text = _ROLLUP.read_text()
    except OSError:
        return 0, 0
    kib = {key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in text.splitlines()[1:])}
    return kib["Rss"] << 10, (kib["Private_Clean"] + kib["Private_Dirty"]) << 10

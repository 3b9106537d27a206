"""The demo on the real model, as `geist-pool demo` runs it.

Property: every answer from the snapshot equals the whole prompt's, nothing of the context is prefilled twice, and nothing is left
behind. Tolerance: none. Reason: it is the first thing that anyone sees of the pool, and what it claims must be so.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from geist_pool.config import PoolConfig
from geist_pool.demo.run import run_demo
from geist_pool.demo.world import QUESTIONS


@pytest.mark.timeout(600)
def test_demo(smollm2: Path, packed_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    written = io.StringIO()
    config = PoolConfig(model=str(smollm2), workers=2, cache_dir=str(packed_dir))
    assert run_demo(config, Console(file=written, width=200))
    text = written.getvalue()
    n_context = int(re.findall(r"(\d+) tokens, computed once", text)[0])
    figures = [tuple(map(int, f)) for f in re.findall(r"reused +(\d+) +prefilled +(\d+)", text)]
    assert 600 <= n_context <= 800
    assert len(figures) == 2 * len(QUESTIONS)
    for (reused, prefilled), (none, whole) in zip(figures[: len(QUESTIONS)], figures[len(QUESTIONS) :], strict=True):
        assert (reused, none) == (n_context, 0)
        assert 0 < prefilled < 64
        assert whole == n_context + prefilled
    assert text.count("identical") == len(QUESTIONS) + 1
    assert "left behind: no process, no shared memory" in text
    assert list((tmp_path / "run" / "geist-pool").iterdir()) == []

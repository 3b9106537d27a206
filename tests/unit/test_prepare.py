"""Packing weights in a process of its own.

Property: an interrupted packing leaves no draft in the cache, a cache that cannot be written is one error in words, and files in
the working directory are not imported. Tolerance: none. Reason: a draft is as large as the model; Ctrl-C must leave nothing; a
server may be started in any directory.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from geist_pool import prepare
from geist_pool.errors import EngineError
from geist_pool.store import packed


def test_an_interrupted_packing_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packed").mkdir()
    drafts: list[Path] = []

    def interrupted(child: subprocess.Popen[bytes], *_: Any, **__: Any) -> None:
        drafts.append(packed.draft_path(tmp_path / "packed", child.pid))
        drafts[0].write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare_model(Path("/nonexistent"), tmp_path, threads=1)
    assert drafts and not drafts[0].exists()


def test_files_in_the_working_directory_are_not_imported(
    tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('not the real one')\n")
    monkeypatch.chdir(tmp_path)
    assert prepare.prepare_model(tiny_model("llama-tiny"), tmp_path / "cache", threads=1).architecture == "llama"


@pytest.mark.parametrize("what", ["lock", "draft", "known"])
def test_a_cache_that_cannot_be_written_is_an_error_in_words(what: str, tmp_path: Path) -> None:
    cache = packed.PackedCache(tmp_path)
    identity = packed.Identity(1, 2, 3, 4)
    blocked = {"lock": tmp_path / "lock", "draft": packed.draft_path(tmp_path, os.getpid()), "known": tmp_path / "known/1-2.new"}
    blocked[what].mkdir()  # nobody, not even root, writes to a directory
    with pytest.raises(EngineError, match="cannot be"):
        if what == "lock":
            with cache.lock():
                pass
        elif what == "draft":
            cache.draft(4096)
        else:
            cache.remember(identity, "00")

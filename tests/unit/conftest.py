"""Fixtures of the unit tests that need a model's vocabulary but no engine."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from geist_pool.text.vocabulary import Vocabulary

DATA = Path(__file__).resolve().parents[1] / "data"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def gguf_metadata(path: Path) -> dict[str, object]:
    """Key-value section of a GGUF file that is known to be sound; strings as bytes. The engine's reader is not used:
    text is tested on its own."""
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
        _, _, n_keys = struct.unpack("<IQQ", file.read(20))

        def string() -> bytes:
            (n,) = struct.unpack("<Q", file.read(8))
            return file.read(n)

        def value(kind: int) -> object:
            if kind == 8:
                return string()
            if kind == 9:
                of, n = struct.unpack("<IQ", file.read(12))
                return [value(of) for _ in range(n)]
            form = _SCALARS[kind]
            return struct.unpack(form, file.read(struct.calcsize(form)))[0]

        out: dict[str, object] = {}
        for _ in range(n_keys):
            key = string().decode()
            (kind,) = struct.unpack("<I", file.read(4))
            out[key] = value(kind)
        return out


@functools.cache
def _vocabulary(path: Path) -> Vocabulary:
    return Vocabulary.from_metadata(gguf_metadata(path).get)


@pytest.fixture(scope="session")
def metadata_of() -> Callable[[str], dict[str, object]]:
    """Metadata of a tiny model by name."""
    return lambda name: gguf_metadata(DATA / "oracle" / "models" / name / f"{name}-f32.gguf")


@pytest.fixture(scope="session")
def vocabulary_of() -> Callable[[str], Vocabulary]:
    """Vocabulary of a tiny model by name."""
    return lambda name: _vocabulary(DATA / "oracle" / "models" / name / f"{name}-f32.gguf")


@pytest.fixture(scope="session")
def smollm2_vocabulary() -> Vocabulary:
    """Vocabulary of SmolLM2-135M-Instruct; skips where the model is not on this machine."""
    named = os.environ.get("GEIST_POOL_TEST_SMOLLM2")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "geist-pool"
    path = Path(named) if named else cache / "models" / "smollm2.gguf"
    if path.is_file():
        return _vocabulary(path)
    pytest.skip("SmolLM2 is not here: set GEIST_POOL_TEST_SMOLLM2 or run `geist-pool pull smollm2`")

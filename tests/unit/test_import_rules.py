"""Who may enter which room: imports of the package, read from its source and, for the worker, from a running interpreter.

Property: sockets, the engine, shared memory and intrinsics each have the few files named here; pure modules import no I/O and no
clock. Tolerance: none. Reason: a decision that does no I/O can be tested as a value; a worker that imports no tokenizer starts
fast and stays small.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import geist_pool

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pool" / "geist_pool"
SOURCES = sorted(PACKAGE.rglob("*.py"))

ONLY_IN = {
    "zmq": {"broker/loop.py", "worker/loop.py", "client/"},
    "geist_pool._geist": {"engine.py"},
    "posix_ipc": {"store/"},
    "mmap": {"store/"},
    "gguf": set(),
    "huggingface_hub": {"hub.py"},
    "prometheus_client": {"metrics.py"},
    "psutil": set(),
    "tokenizers": {"text/"},
    "jinja2": {"text/"},
    "click": {"commands.py"},
    "multiprocessing": set(),
}

PURE = ("broker/machine.py", "broker/placement.py", "broker/directory.py", "worker/batch.py", "client/wire.py", "client/calls.py")
IMPURE = {  # input and output, clocks, randomness, other processes and threads
    *("asyncio", "ctypes", "glob", "http", "io", "logging", "mmap", "multiprocessing", "os", "pathlib", "posix_ipc", "random"),
    *("secrets", "select", "selectors", "shutil", "signal", "socket", "ssl", "subprocess", "sys", "tempfile"),
    *("threading", "time", "datetime", "urllib", "uuid", "zmq", "numpy", "psutil", "queue"),
}
IMPURE_OURS = {
    *("geist_pool.engine", "geist_pool.client.sync", "geist_pool.client.aio", "geist_pool.models", "geist_pool.supervisor"),
    "geist_pool.observe",
    *("geist_pool.store.shm", "geist_pool.store.packed", "geist_pool.store.files", "geist_pool.lifeline", "geist_pool.terminal"),
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports anywhere, also inside functions; for `from a import b` both a and a.b."""
    package = ["geist_pool", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            base = base if node.level else node.module or ""
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "__import__",
            "import_module",
        ):
            raise AssertionError(f"{path}:{node.lineno}: a dynamic import cannot be checked")


def is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def test_the_rules_look_at_something() -> None:
    assert len(SOURCES) > 20
    assert {"zmq", "geist_pool.protocol"} <= set(imports(PACKAGE / "client" / "sync.py"))


@pytest.mark.parametrize("room", sorted(ONLY_IN))
def test_only_these_files_import(room: str) -> None:
    allowed = ONLY_IN[room]
    entered = {name_of(p) for p in SOURCES if any(is_in(m, room) for m in imports(p))}
    assert {f for f in entered if not any(f == a or (a.endswith("/") and f.startswith(a)) for a in allowed)} == set()


@pytest.mark.parametrize("file", PURE)
def test_pure_modules_import_no_io_and_no_clock(file: str) -> None:
    """Also through what they import of ours."""
    seen: set[Path] = set()
    ahead = [PACKAGE / file]
    while ahead:
        path = ahead.pop()
        if path in seen:
            continue
        seen.add(path)
        for module in imports(path):
            assert module.split(".")[0] not in IMPURE, f"{file} imports {module} by way of {name_of(path)}"
            assert not any(is_in(module, ours) for ours in IMPURE_OURS), f"{file} imports {module} by way of {name_of(path)}"
            ahead += source_of(module)


def source_of(module: str) -> list[Path]:
    """The files that importing one of our modules runs, but for the packages' own."""
    if not is_in(module, "geist_pool"):
        return []
    at = PACKAGE.parent.joinpath(*module.split("."))
    return [p for p in (at.with_suffix(".py"), at / "__init__.py") if p.is_file()]


def test_broker_and_worker_do_not_know_each_other() -> None:
    for path in SOURCES:
        if name_of(path).startswith("broker/"):
            assert not any(is_in(m, "geist_pool.worker") for m in imports(path)), path
        if name_of(path).startswith("worker/"):
            assert not any(is_in(m, "geist_pool.broker") for m in imports(path)), path


def modules_after(statement: str) -> set[str]:
    """Everything that an interpreter has loaded after one import."""
    code = f"{statement}; import sys, json; print(json.dumps(list(sys.modules)))"
    path = str(Path(geist_pool.__file__).parents[1])
    env = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    return set(json.loads(done.stdout))


def test_worker_loads_no_tokenizer_and_nothing_to_show() -> None:
    loaded = modules_after("import geist_pool.worker.main")
    assert "geist_pool.engine" in loaded
    for module in (
        "tokenizers",
        "rich",
        "prometheus_client",
        "jinja2",
        "click",
        "huggingface_hub",
        "geist_pool.client",
    ):
        assert module not in loaded


def test_supervisor_needs_no_engine() -> None:
    loaded = modules_after("import geist_pool.supervisor")
    assert not {"geist_pool.engine", "geist_pool._geist", "tokenizers", "huggingface_hub", "prometheus_client"} & loaded


def test_intrinsics_stay_among_the_kernels() -> None:
    sources = [p for pattern in ("*.c", "*.h") for p in (ROOT / "native").rglob(pattern)]
    assert len(sources) > 20
    kernels = ROOT / "native" / "src" / "kernels"
    headers = ("immintrin.h", "x86intrin.h", "arm_neon.h", "emmintrin.h", "xmmintrin.h", "cpuid.h")
    entered = {p for p in sources if any(h in p.read_text() for h in headers)}
    assert {p.relative_to(ROOT).as_posix() for p in entered if kernels not in p.parents} == set()
    assert any(kernels in p.parents for p in entered)


def test_environment_is_read_in_config_alone() -> None:
    for path in SOURCES:
        if name_of(path) != "config.py":
            assert "environ" not in {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}, path
            assert not any(m in ("os.environ", "os.getenv") for m in imports(path)), path

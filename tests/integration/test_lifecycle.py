"""The server as a service manager sees it: ready file, exit codes, deaths, kept contexts, metrics, and the commands that look.

Property: contexts outlive a killed broker, a killed supervisor and, with --keep-contexts, a stop, under the same ids and with the
same answers; a hanging worker is replaced; exit codes are those of docs/operations.md; nothing is left behind. Tolerance: none.
Reason: a pool is run by programs that look at nothing else. Waits have generous limits; no duration is asserted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from geist_pool.client import Client
from geist_pool.config import PoolConfig, store_key
from geist_pool.store import shm
from geist_pool.supervisor import Supervisor

STORY = (
    "The ferry does not cross at night. Hesper keeps the inn on the wrong bank, Odo keeps the ferry, and nobody keeps time. " * 3
)
SUFFIX = "\nNip says:"
GP = [sys.executable, "-c", "from geist_pool.cli import main; main()"]


@pytest.fixture(scope="module")
def make_config(tiny_model: Callable[..., Path], packed_dir: Path) -> Iterator[Callable[..., PoolConfig]]:
    with tempfile.TemporaryDirectory(prefix="gp-") as run, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", run)
        patch.setenv("XDG_DATA_HOME", f"{run}/data")
        fields = {"model": str(tiny_model("qwen35-tiny")), "workers": 2, "cache_dir": str(packed_dir), "memory": 64 << 20}
        yield lambda **changes: PoolConfig(**{**fields, "log_level": "error", "pin_cores": False, **changes})
        assert list((Path(run) / "geist-pool").iterdir()) == []


def until(what: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def words_of(config: PoolConfig, *more: str) -> list[str]:
    given = {"model": config.model, "workers": 1, "name": config.name, "cache-dir": config.cache_dir, "memory": "8MiB"}
    return [*GP, *(w for k, v in given.items() for w in (f"--{k}", str(v))), *more]


@contextmanager
def server(config: PoolConfig, ready: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """A server process that is ready."""
    command = words_of(config, "--ready-file", str(ready), "--log-level", "error", *more)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: process.poll() is not None or str(process.pid) in (ready.read_text() if ready.exists() else ""))
            assert process.poll() is None, process.communicate()[1]
            yield process
        finally:
            process.kill()


def answers(client: Client, context: str) -> tuple[int, ...]:
    """What the context says, wholly reused."""
    said = client.generate(SUFFIX, context=context, max_tokens=6, ignore_eog=True)
    assert said.usage.reused == client.context(context).n_tokens
    return said.tokens


def test_ready_file_exit_code_and_kept_contexts(
    make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str], tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    """Stop and start again: the same contexts; start with another model: none, and no residue."""
    config, ready = make_config(name=new_pool_name()), tmp_path / "ready"
    with server(config, ready, "--keep-contexts") as process:
        told = json.loads(ready.read_text())
        assert told["pid"] == process.pid
        with Client(told["address"]) as client:
            base = client.create_context(STORY, name="world").context
            child = client.create_context(" Nip waits.", on="world", name="nip", pin=True).context
            said = answers(client, "nip")
        process.terminate()
        assert process.wait(60) == 0 and not ready.exists()
    assert shm.list_objects(store_key(config.name)) != []
    with server(config, ready, "--keep-contexts") as process:
        with Client(pool=config.name) as client:
            until(lambda: len(client.contexts()) == 2)
            found = {c.name: c for c in client.contexts()}
            assert {n: (c.id, c.n_tokens, c.parent, c.pinned) for n, c in found.items()} == {
                "world": (base.id, base.n_tokens, None, False),
                "nip": (child.id, child.n_tokens, base.id, True),
            }
            assert answers(client, "nip") == said
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    kept = {o.name for o in shm.list_objects(store_key(config.name))}
    assert kept
    other = msgspec.structs.replace(config, model=str(tiny_model("qwen3-tiny")))
    with server(other, ready, "--keep-contexts") as process:
        until(lambda: not kept & {o.name for o in shm.list_objects(store_key(config.name))})
        with Client(pool=config.name) as client:
            assert client.contexts() == ()
        process.terminate()
        assert process.wait(60) == 0
    assert shm.list_objects(store_key(config.name)) == []


@pytest.mark.parametrize("how", ["supervisor", "supervisor, contexts kept", "every process"])
def test_killed_pool_leaves_no_child_and_its_contexts_are_adopted_or_gone(
    make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str], tmp_path: Path, how: str
) -> None:
    """FINDINGS rows 14 and 15: after SIGKILL no orphan; sealed contexts are removed by a broker that still can, else adopted."""
    config, ready = make_config(name=new_pool_name()), tmp_path / "ready"
    with server(config, ready, *(["--keep-contexts"] if "kept" in how else [])) as process:
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        with Client(pool=config.name) as client:
            made = client.create_context(STORY, name="world").context
            said = answers(client, "world")
        doomed = family if how == "every process" else []
        for child in doomed:
            child.suspend()  # so that none of them tidies up between its parent's death and its own
        process.kill()
        for child in doomed:
            child.kill()
        process.wait()
        _gone, alive = psutil.wait_procs(family, timeout=30)
        assert not alive
    assert ready.exists()  # nobody was there to remove it
    expected = 0 if how == "supervisor" else 1
    assert bool(shm.list_objects(store_key(config.name))) == bool(expected)
    with server(config, ready) as process:
        assert json.loads(ready.read_text())["pid"] == process.pid
        with Client(pool=config.name) as client:
            until(lambda: len(client.contexts()) == expected)
            if expected:
                assert client.context("world").id == made.id
                assert answers(client, "world") == said
        process.terminate()
        assert process.wait(60) == 0
    assert shm.list_objects(store_key(config.name)) == []


def test_second_server_and_early_signal_have_their_codes(
    make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str], tmp_path: Path
) -> None:
    config, ready = make_config(name=new_pool_name()), tmp_path / "ready"
    with server(config, ready) as process:
        second = subprocess.run(words_of(config), capture_output=True, text=True, timeout=60)
        assert second.returncode == 3 and f"process {process.pid}" in second.stderr
        process.terminate()
        assert process.wait(60) == 0
    gone = subprocess.run([*GP, "--name", config.name, "stats"], capture_output=True, text=True, timeout=60)
    assert gone.returncode == 5
    with subprocess.Popen(words_of(config), stderr=subprocess.PIPE, text=True) as late:
        until(lambda: bool(psutil.Process(late.pid).children()))
        for child in psutil.Process(late.pid).children():  # the one that prepares the weights: now the start cannot get on
            child.suspend()
        late.terminate()
        _, err = late.communicate(timeout=60)
        assert late.returncode == 143 and "Traceback" not in err, err
    assert shm.list_objects(store_key(config.name)) == []


def test_killed_broker_is_back_with_every_context(
    make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str]
) -> None:
    config = make_config(name=new_pool_name())
    with Supervisor(config) as pool, Client(pool.config.address, connect_timeout=30) as client:
        ids = {client.create_context(STORY, name="world").context.id}
        ids |= {client.create_context(f" {i}", on="world", name=f"c{i}").context.id for i in range(20)}
        said = answers(client, "c7")
        before = pool.pids
        began = time.monotonic()
        os.kill(before["broker"], signal.SIGKILL)
        until(lambda: len(pool.pids) == 3 and not set(pool.pids.values()) & set(before.values()))
        until(lambda: client.stats().workers == 2)
        until(lambda: {c.id for c in client.contexts()} == ids)
        print(f"broker back with {len(ids)} contexts and all workers after {time.monotonic() - began:.2f} s")
        assert answers(client, "c7") == said
    assert shm.list_objects(store_key(config.name)) == []


def test_stopped_worker_is_replaced_and_its_request_answered(
    make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str]
) -> None:
    """SIGSTOP: the process is there and says nothing. The request is in its hands, and ends with the tokens it would have had."""
    faults = ("w0.0:slow-decode=50",)
    config = make_config(name=new_pool_name(), workers=1, faults=faults, heartbeat_s=0.2, worker_timeout_s=1.5)
    with Supervisor(config) as pool, Client(pool.config.address, timeout=60) as client:
        client.create_context(STORY, name="world")
        expected = client.generate(SUFFIX, context="world", max_tokens=20, ignore_eog=True)
        assert expected.attempts == 1
        before = pool.pids
        with client.stream(SUFFIX, context="world", max_tokens=20, ignore_eog=True) as stream:
            next(stream)
            os.kill(before["w0"], signal.SIGSTOP)
            said = stream.result()
        assert (said.tokens, said.attempts) == (expected.tokens, 2)
        after = pool.pids
        assert after["broker"] == before["broker"] and after["w0"] != before["w0"]
        assert dict(pool.deaths) == {"w0": 1} and client.stats().workers_lost == 1
    assert shm.list_objects(store_key(config.name)) == []


def test_what_looks_at_a_pool(make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str]) -> None:
    config = make_config(name=new_pool_name(), metrics=":0")

    def gp(*words: str) -> str:
        done = subprocess.run([*GP, "--name", config.name, *words], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    with Supervisor(config) as pool, Client(pool.config.address) as client:
        made = client.create_context(STORY, name="world").context
        client.create_context(" Nip waits.", on="world", name="nip")
        answers(client, "nip")
        text = urllib.request.urlopen(f"http://{pool.metrics_address}/metrics", timeout=30).read().decode()
        for line in ("geist_pool_up 1.0", "geist_pool_workers 2.0", 'geist_pool_requests_total{op="generate"} 1.0'):
            assert f"\n{line}\n" in text, text
        assert f'geist_pool_tokens_total{{kind="generated"}} {float(client.stats().tokens_generated)}' in text
        shown = gp("top", "--once", "--interval", "0.1")
        for word in ("world", "nip", "slots", "per second", "of 64.0 MiB"):
            assert word in shown
        assert made.id in gp("contexts", "ls")
        assert "tokens_generated" in gp("stats")
        assert json.loads(gp("stats", "--json"))["contexts"] == 2
        assert len(gp("story", made.id).splitlines()) > 1
    assert shm.list_objects(store_key(config.name)) == []


def test_save_and_load_by_command(make_config: Callable[..., PoolConfig], new_pool_name: Callable[[], str]) -> None:
    config = make_config(name=new_pool_name())

    def gp(*words: str) -> str:
        command = [*GP, "--name", config.name, "contexts", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    with Supervisor(config) as pool, Client(pool.config.address) as client:
        n = client.create_context(STORY, name="world").context.n_tokens
        said = answers(client, "world")
        assert f"{n} tokens" in gp("save", "world", "night one")
        assert "night one" in gp("saved")
        gp("drop", "world")
        assert "loaded" in gp("load", "night one", "--name", "again", "--pin")
        assert client.context("again").pinned and answers(client, "again") == said
    assert shm.list_objects(store_key(config.name)) == []

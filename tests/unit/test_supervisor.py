"""The supervisor's promises, with stub programs in the children's place.

Property: what dies comes back under a new life's name; after a stop, after a failed start and after SIGKILL of the supervisor no
child, no socket and no shared-memory object of the pool is left; a second pool of the name does not start. Tolerance: none.
Reason: a server that leaves orphans or residue cannot be restarted. Waits have generous limits; no duration is asserted.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from geist_pool import restarts
from geist_pool.client import Client
from geist_pool.config import PoolConfig, store_key
from geist_pool.cores import Cores, assign, find_cores, read_quota
from geist_pool.errors import ConfigError, Internal, ModelError, NameTaken, PoolLost
from geist_pool.prepare import Facts
from geist_pool.store import shm
from geist_pool.store.names import object_name
from geist_pool.supervisor import Programs, Supervisor, faults_for

STUBS = Path(__file__).parent / "stubs"
PROGRAMS = Programs(broker="stub_broker", worker="stub_worker")
FACTS = Facts(
    architecture="stub",
    fingerprint="00" * 32,
    n_vocab=1,
    n_ctx_train=1,
    n_params=1,
    file_bytes=1,
    packed_bytes=1,
    recurrent_bytes=1,
    kv_bytes_per_token=1,
)


def until(what: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def pool_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PoolConfig]]:
    """Makes configurations whose sockets, cache and name are this test's own; afterwards nothing of them may be left."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data-home"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STUBS), *filter(None, sys.path)]))
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    name = f"t{os.getpid()}"

    def make(**changes: object) -> PoolConfig:
        fields = {"name": name, "model": str(model), "workers": 2, "cache_dir": str(tmp_path / "cache"), "memory": 1 << 20}
        return PoolConfig(**{**fields, **changes})

    yield make
    assert shm.list_objects(store_key(name)) == []
    assert [p.name for p in (tmp_path / "run" / "geist-pool").iterdir() if p.suffix == ".ipc"] == []
    assert not [c for c in psutil.Process().children(recursive=True) if c.status() != psutil.STATUS_ZOMBIE]


def supervisor(config: PoolConfig) -> Supervisor:
    return Supervisor(config, programs=PROGRAMS, prepare=lambda *_: FACTS)


def put_object(pool: str) -> str:
    name = object_name(store_key(pool), "0123456789ab", "i")
    with shm.Writer(name, 4096) as writer:
        writer.keep()
    return name


def test_starts_answers_and_leaves_nothing(pool_config: Callable[..., PoolConfig]) -> None:
    with supervisor(pool_config()) as pool:
        pids = pool.pids
        assert set(pids) == {"broker", "w0", "w1"}
        put_object(pool.config.name)
        with Client(pool.config.address) as client:
            assert client.stats().workers == 2
            assert client.stats().store_limit == 1 << 20
    assert all(gone(pid) for pid in pids.values())


def test_workers_run_on_the_cores_assigned_to_them(pool_config: Callable[..., PoolConfig]) -> None:
    cores = find_cores()
    expected = assign(cores, 1, 1)
    assert expected is not None
    with supervisor(pool_config(workers=1)) as pool:
        assert os.sched_getaffinity(pool.pids["w0"]) == set(expected[0])
        assert os.sched_getaffinity(pool.pids["broker"]) == os.sched_getaffinity(0)
    with supervisor(pool_config(workers=1, pin_cores=False)) as pool:
        assert os.sched_getaffinity(pool.pids["w0"]) == os.sched_getaffinity(0)


def test_killed_worker_comes_back_alone(pool_config: Callable[..., PoolConfig]) -> None:
    with supervisor(pool_config()) as pool:
        before = pool.pids
        os.kill(before["w1"], signal.SIGKILL)
        until(lambda: len(pool.pids) == 3 and pool.pids["w1"] != before["w1"])
        after = pool.pids
        assert {n: after[n] for n in ("broker", "w0")} == {n: before[n] for n in ("broker", "w0")}
        with Client(pool.config.address) as client:
            until(lambda: client.stats().workers == 3)  # the stub counts names: w0.0, w1.0 and the new life w1.1


def test_killed_broker_brings_everybody_back(pool_config: Callable[..., PoolConfig]) -> None:
    with supervisor(pool_config()) as pool:
        before = pool.pids
        os.kill(before["broker"], signal.SIGKILL)
        until(lambda: len(pool.pids) == 3 and not set(pool.pids.values()) & set(before.values()))
        assert all(gone(pid) for pid in before.values())
        with Client(pool.config.address, connect_timeout=10) as client:
            until(lambda: client.stats().workers == 2)


def test_children_that_ignore_the_request_are_killed(pool_config: Callable[..., PoolConfig]) -> None:
    with supervisor(pool_config(faults=("deaf",), stop_timeout_s=0.3)) as pool:
        pids = pool.pids
    assert all(gone(pid) for pid in pids.values())


def test_second_pool_of_a_name_is_refused_and_names_the_first(pool_config: Callable[..., PoolConfig]) -> None:
    with supervisor(pool_config()) as pool:
        kept = put_object(pool.config.name)
        with pytest.raises(NameTaken, match=rf"running already \(process {os.getpid()}\)"), supervisor(pool_config()):
            raise AssertionError("unreachable")
        assert [f.name for f in shm.list_objects(store_key(pool.config.name))] == [kept]  # the refused one touched nothing
        with Client(pool.config.address) as client:
            assert client.stats().workers == 2


def test_child_that_crashes_at_the_start_is_an_error(pool_config: Callable[..., PoolConfig]) -> None:
    for fault, words in (
        ("w1:crash", "w1 ended with exit code 3, 3 times in a row,"),
        ("broker:crash", "broker ended with exit code 3 before"),
    ):
        with pytest.raises(Internal, match=words), supervisor(pool_config(faults=(fault,))):
            raise AssertionError("unreachable")


def test_worker_that_crashes_once_at_the_start_gets_another_life(pool_config: Callable[..., PoolConfig]) -> None:
    with supervisor(pool_config(faults=("w1.0:crash",))) as pool:
        assert set(pool.pids) == {"broker", "w0", "w1"}
        assert dict(pool.deaths) == {"w1": 1} and pool.restarts == 1


def test_gives_up_when_nothing_lives_any_more(
    pool_config: Callable[..., PoolConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool was ready; then every worker dies at once, again and again."""
    monkeypatch.setattr(restarts, "PAUSE_MOST_S", 0.05)
    trap = tmp_path / "trap"
    with pytest.raises(PoolLost, match="every worker died"), supervisor(pool_config(faults=(f"crash-if={trap}",))) as pool:
        pids = pool.pids
        trap.touch()
        for name in ("w0", "w1"):
            os.kill(pids[name], signal.SIGKILL)
        pool.wait()
    assert all(gone(pid) for pid in pids.values())


def test_hanging_broker_is_killed_and_comes_back(pool_config: Callable[..., PoolConfig]) -> None:
    with supervisor(pool_config(worker_timeout_s=0.5)) as pool:
        before = pool.pids
        with Client(pool.config.address) as client:
            for _ in range(3):  # time for the watchdog to have had an answer
                client.stats()
                time.sleep(0.3)
        os.kill(before["broker"], signal.SIGSTOP)
        until(lambda: len(pool.pids) == 3 and pool.pids["broker"] != before["broker"])
        with Client(pool.config.address, connect_timeout=10) as client:
            until(lambda: client.stats().workers == 2)


def test_hanging_broker_does_not_keep_the_pool_from_stopping(pool_config: Callable[..., PoolConfig]) -> None:
    with supervisor(pool_config(stop_timeout_s=0.3)) as pool:
        pids = pool.pids
        os.kill(pids["broker"], signal.SIGSTOP)
        os.kill(pids["w0"], signal.SIGSTOP)
    assert all(gone(pid) for pid in pids.values())


def test_ready_file_holds_address_and_pid_while_the_pool_is_ready(pool_config: Callable[..., PoolConfig], tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    file.write_text("of a pool that was killed")
    with supervisor(pool_config(ready_file=str(file), metrics="127.0.0.1:0")) as pool:
        found = msgspec.json.decode(file.read_bytes())
        assert found == {
            "pid": os.getpid(),
            "name": pool.config.name,
            "address": pool.config.address,
            "metrics": pool.metrics_address,
        }
        assert b"geist_pool_up 1.0" in urllib.request.urlopen(f"http://{pool.metrics_address}/metrics", timeout=10).read()
    assert not file.exists()
    with pytest.raises(Internal), supervisor(pool_config(ready_file=str(file), faults=("broker:crash",))):
        raise AssertionError("unreachable")
    assert not file.exists()


def test_directory_of_saved_contexts_is_made_and_private(pool_config: Callable[..., PoolConfig], tmp_path: Path) -> None:
    saved = tmp_path / "data" / "saved"
    with supervisor(pool_config(saved_dir=str(saved))):
        assert saved.stat().st_mode & 0o777 == 0o700
    saved.chmod(0o755)
    with pytest.raises(ConfigError, match="open to other users") as caught, supervisor(pool_config(saved_dir=str(saved))):
        raise AssertionError("unreachable")
    assert caught.value.path == "saved_dir"


def test_worker_that_says_nothing_is_an_error_at_the_deadline(pool_config: Callable[..., PoolConfig]) -> None:
    config = pool_config(faults=("w0:silent",), ready_timeout_s=1.5)
    with pytest.raises(Internal, match="1 of 2 workers"), supervisor(config):
        raise AssertionError("unreachable")


def test_missing_model_and_engine_errors_arrive_as_they_are(pool_config: Callable[..., PoolConfig], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model file"), supervisor(pool_config(model=str(tmp_path / "none.gguf"))):
        raise AssertionError("unreachable")

    def refuse(*_: object) -> Facts:
        raise ModelError("tensor x is missing")

    with pytest.raises(ModelError, match="tensor x"), Supervisor(pool_config(), programs=PROGRAMS, prepare=refuse):
        raise AssertionError("unreachable")


def test_kept_contexts_stay(pool_config: Callable[..., PoolConfig]) -> None:
    with supervisor(pool_config(keep_contexts=True)) as pool:
        name = put_object(pool.config.name)
    assert [f.name for f in shm.list_objects(store_key(pool.config.name))] == [name]
    assert shm.unlink(name)


SCRIPT = """
import sys, msgspec, test_supervisor as t
from geist_pool.config import PoolConfig
from geist_pool.signals import signals_interrupt
try:
    with signals_interrupt(), t.supervisor(msgspec.json.decode(sys.argv[1], type=PoolConfig)) as pool:
        print(*pool.pids.values(), flush=True)
        pool.wait()
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def start_script(config: PoolConfig) -> tuple[subprocess.Popen[str], list[int]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, msgspec.json.encode(config).decode()], stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


def test_killed_supervisor_leaves_no_orphan_and_its_name_is_free(pool_config: Callable[..., PoolConfig]) -> None:
    process, pids = start_script(pool_config())
    with process:
        assert len(pids) == 3
        process.kill()
        process.wait()
        until(lambda: all(gone(pid) for pid in pids))
    with supervisor(pool_config()) as pool:  # sockets of the dead are no obstacle
        assert len(pool.pids) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_supervisor_ends_all(pool_config: Callable[..., PoolConfig], number: signal.Signals) -> None:
    process, pids = start_script(pool_config())
    with process:
        assert process.stdout is not None
        process.send_signal(number)
        assert process.stdout.readline().strip() == "stopped"
        assert process.wait(30) == 0
    assert all(gone(pid) for pid in pids)


def test_signal_during_the_start_ends_all(pool_config: Callable[..., PoolConfig]) -> None:
    config = pool_config(faults=("w0:silent",))  # it never becomes ready
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])}
    command = [sys.executable, "-c", SCRIPT, msgspec.json.encode(config).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        until(lambda: len(psutil.Process(process.pid).children()) == 3)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=30)[0] == "stopped\n"


def test_faults_reach_whom_they_name() -> None:
    words = ("a", "w0:b", "w0.0:c=1", "broker:d")
    assert faults_for(words, "w0", 0) == ("a", "b", "c=1")
    assert faults_for(words, "w0", 1) == ("a", "b")
    assert faults_for(words, "broker", 0) == ("a", "d")


def test_cores_are_whole_and_respect_the_quota() -> None:
    cores = Cores(((0, 4), (1, 5), (2, 6), (3, 7)))
    assert assign(cores, 2, 2) == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert assign(cores, 4, 1) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert assign(cores, 5, 1) is None
    limited = Cores(cores.cores, quota=2.5)
    assert (limited.usable, assign(limited, 2, 1), assign(limited, 3, 1)) == (2, [(0, 4), (1, 5)], None)
    assert Cores(cores.cores, quota=0.5).usable == 1


def test_quota_is_the_tightest_on_the_way_up(tmp_path: Path) -> None:
    inner = tmp_path / "cg" / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "proc").write_text("0::/a/b\n")
    assert read_quota(tmp_path / "proc", tmp_path / "cg") is None
    (inner / "cpu.max").write_text("max 100000\n")
    assert read_quota(tmp_path / "proc", tmp_path / "cg") is None
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert read_quota(tmp_path / "proc", tmp_path / "cg") == 1.5
    old = tmp_path / "old" / "cpu" / "x"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("200000\n")
    (old / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "proc").write_text("4:memory:/x\n1:cpu:/x\n0::/\n")
    assert read_quota(tmp_path / "proc", tmp_path / "old") == 2.0


@pytest.mark.parametrize("what", ["file", "listener", "tcp"])
def test_an_address_that_is_anothers_is_refused_and_left_alone(
    pool_config: Callable[..., PoolConfig], tmp_path: Path, what: str
) -> None:
    path = tmp_path / "its.ipc"
    address = f"ipc://{path}"
    with socket.socket(socket.AF_INET if what == "tcp" else socket.AF_UNIX) as other:
        if what == "file":
            path.write_text("precious")
        elif what == "tcp":
            other.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        else:
            other.bind(str(path))
        if what != "file":
            other.listen()
        with pytest.raises(ConfigError) as caught, supervisor(pool_config(address=address)):
            raise AssertionError("unreachable")
        assert caught.value.path == "address"
        if what == "file":
            assert path.read_text() == "precious"
        elif what == "listener":
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))


def test_another_pool_at_the_address_is_not_taken_for_this_one(
    pool_config: Callable[..., PoolConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the look at the address and the broker's own, so that only its name tells."""
    with supervisor(pool_config()) as first:
        monkeypatch.setattr("geist_pool.supervisor.refuse_taken", lambda _: None)
        config = pool_config(name="other", address=first.config.address, faults=("broker:silent",), ready_timeout_s=1.0)
        with pytest.raises(Internal, match="0 of 2 workers"), supervisor(config):
            raise AssertionError("unreachable")
        with Client(first.config.address) as client:  # its socket is still there
            assert client.info().pool == first.config.name


def test_files_of_the_working_directory_are_not_imported(
    pool_config: Callable[..., PoolConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zmq.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    with supervisor(pool_config()) as pool:
        assert len(pool.pids) == 3


def test_pools_of_one_name_in_two_directories_share_nothing(
    pool_config: Callable[..., PoolConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with supervisor(pool_config()) as first:
        kept = put_object(first.config.name)
        (tmp_path / "run2").mkdir(mode=0o700)
        with monkeypatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run2"))
            with supervisor(pool_config()) as second:
                own = put_object(second.config.name)
                assert own != kept
            assert shm.list_objects(store_key(first.config.name)) == []
        assert [f.name for f in shm.list_objects(store_key(first.config.name))] == [kept]


def test_a_link_to_the_directory_is_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is the same file, so the objects must be the same too."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    keys = set()
    for directory in ("real", "link", "real/../link"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / directory))
        keys.add(store_key("p"))
    assert len(keys) == 1
    assert store_key("q") not in keys

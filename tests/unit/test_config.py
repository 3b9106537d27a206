"""Settings: where they come from, and what is refused.

Property: flags over environment over file over defaults, and every wrong setting is a ConfigError that names it. Tolerance: none.
Reason: a setting that is silently ignored is found in production.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from geist_pool import config
from geist_pool.config import BrokerConfig, PoolConfig, SpaceQuota, WorkerConfig
from geist_pool.errors import ConfigError


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment without settings; its config directory holds no file yet."""
    return {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_defaults_need_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    found = config.load(environ=environ)
    address = f"ipc:///tmp/geist-pool-{os.getuid()}/default.ipc"
    saved = str(tmp_path / ".local" / "share" / "geist-pool" / "saved")
    assert found == PoolConfig(address=address, cache_dir=str(tmp_path / ".cache" / "geist-pool"), saved_dir=saved)


def test_precedence(environ: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "config" / "geist-pool" / "config.toml", "workers = 2\nthreads = 2\nslots = 2\nmemory = '1MiB'\n")
    environ |= {"GEIST_POOL_THREADS": "3", "GEIST_POOL_SLOTS": "3", "GEIST_POOL_KEEP_CONTEXTS": "true"}
    found = config.load({"slots": 4, "queue": None}, environ=environ)
    assert (found.workers, found.threads, found.slots, found.queue) == (2, 3, 4, 1024)
    assert (found.memory, found.keep_contexts) == (1 << 20, True)


def test_named_file_is_read_instead(environ: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "config" / "geist-pool" / "config.toml", "workers = 2\n")
    other = write(tmp_path / "other.toml", "threads = 5\n")
    for found in (
        config.load(config_file=other, environ=environ),
        config.load(environ={**environ, "GEIST_POOL_CONFIG": str(other)}),
    ):
        assert (found.workers, found.threads) == (0, 5)
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(config_file=tmp_path / "none.toml", environ=environ)


@pytest.mark.parametrize(
    ("text", "path", "words"),
    [
        ("worker = 1", "worker", "there is no setting 'worker'"),
        ("workers = '2'", "workers", "Expected `int`"),
        ("workers = -1", "workers", ">= 0"),
        ("tier = 'sse'", "tier", "Invalid enum value"),
        ("memory = 'much'", "memory", "a size is"),
        ("name = 'a/b'", "name", "regex"),
        ("[nested]\nworkers = 1", "nested", "no setting"),
        ("spaces = 3", "spaces", "are tables"),
        ("[spaces.a]\nmemory = 'much'", "spaces.a.memory", "a size is"),
        ("[spaces.a]\nqueue = -1", "spaces", r">= 0.*in spaces"),
        ("[spaces.a]\nbytes = 1", "spaces", "unknown field"),
        ("workers = ", "config", "is no TOML"),
    ],
)
def test_wrong_file_names_file_and_setting(environ: dict[str, str], tmp_path: Path, text: str, path: str, words: str) -> None:
    file = write(tmp_path / "bad.toml", text)
    with pytest.raises(ConfigError, match=words) as caught:
        config.load(config_file=file, environ=environ)
    assert caught.value.path == path
    if "memory" not in path:
        assert str(file) in caught.value.message


def test_wrong_environment_names_the_variable(environ: dict[str, str]) -> None:
    for key, value in (("GEIST_POOL_WORKERS", "many"), ("GEIST_POOL_NONSENSE", "1")):
        with pytest.raises(ConfigError) as caught:
            config.load(environ={**environ, key: value})
        assert caught.value.path == key


def test_variables_of_tests_are_no_settings(environ: dict[str, str]) -> None:
    assert config.load(environ={**environ, "GEIST_POOL_TEST_SMOLLM2": "/x"}) == config.load(environ=environ)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0", "a b", "x" * 33, "-a", "a\n"])
def test_names_that_could_leave_the_directory_are_refused(environ: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load({"name": name}, environ=environ)
    assert caught.value.path == "name"
    with pytest.raises(ConfigError):
        config.complete(PoolConfig(name=name), config.read_environment(environ))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "tcp://localhost:1", "tcp://[::1]:65535", "ipc:///run/x.ipc"])
def test_local_addresses_are_taken(address: str) -> None:
    assert config.check_address(address) == address


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("tcp://0.0.0.0:5555", "reachable from other machines"),
        ("tcp://*:5555", "reachable from other machines"),
        ("tcp://192.168.1.2:5555", "reachable from other machines"),
        ("tcp://127.0.0.1.example.org:80", "reachable from other machines"),
        ("tcp://127.0.0.1:0", "not in 1"),
        ("tcp://127.0.0.1", "an address is"),
        ("ipc://relative", "absolute"),
        ("ipc:///" + "x" * 120, "longer than"),
        ("inproc://x", "an address is"),
        ("nonsense", "an address is"),
    ],
)
def test_other_addresses_are_refused(address: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        config.check_address(address)
    assert caught.value.path == "address"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("9464", ("127.0.0.1", 9464)),
        (":0", ("127.0.0.1", 0)),
        ("localhost:1", ("localhost", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("0.0.0.0:9464", None),
        ("[::]:9464", None),
        ("example.org:80", None),
        ("127.0.0.1", None),
        ("127.0.0.1:65536", None),
        ("http://127.0.0.1:80", None),
    ],
)
def test_metrics_stay_on_the_loopback(text: str, found: tuple[str, int] | None) -> None:
    if found is not None:
        assert config.check_metrics_address(text) == found
        return
    with pytest.raises(ConfigError) as caught:
        config.check_metrics_address(text)
    assert caught.value.path == "metrics"
    with pytest.raises(ConfigError):
        config.complete(PoolConfig(metrics=text))


def test_quotas_of_spaces_are_tables_of_the_file(environ: dict[str, str], tmp_path: Path) -> None:
    text = "[spaces.red]\nmemory = '1GiB'\nqueue = 100\ncontexts = 50\n[spaces.'the blue one']\nqueue = 5\n"
    found = config.load(config_file=write(tmp_path / "c.toml", text), environ=environ)
    assert found.spaces == {
        "red": SpaceQuota(memory=1 << 30, queue=100, contexts=50),
        "the blue one": SpaceQuota(memory=0, queue=5, contexts=0),
    }
    with pytest.raises(ConfigError, match="tables"):
        config.load(environ={**environ, "GEIST_POOL_SPACES": "red"})


def test_paths_become_absolute(environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = config.load({"saved_dir": "s", "ready_file": "r", "cache_dir": "c"}, environ=environ)
    assert (found.saved_dir, found.ready_file, found.cache_dir) == tuple(str(tmp_path / x) for x in "src")
    assert config.load(environ={**environ, "XDG_DATA_HOME": "/d"}).saved_dir == "/d/geist-pool/saved"


@pytest.mark.parametrize(
    ("text", "n"), [("0", 0), ("12", 12), ("1k", 1000), ("2KiB", 2048), ("1.5 GB", 1_500_000_000), ("8GiB", 8 << 30), (7, 7)]
)
def test_sizes(text: object, n: int) -> None:
    assert config.parse_size(text, "memory") == n


@pytest.mark.parametrize("text", ["", "-1", "1 parsec", "0x10", True, None, 1.5])
def test_sizes_that_are_none(text: object) -> None:
    with pytest.raises(ConfigError):
        config.parse_size(text, "memory")


def test_private_directory(tmp_path: Path) -> None:
    made = tmp_path / "a" / "b"
    config.make_private_dir(made)
    config.make_private_dir(made)
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    with pytest.raises(ConfigError, match="open to other users"):
        config.make_private_dir(made)
    link = tmp_path / "link"
    made.chmod(0o700)
    link.symlink_to(made)
    with pytest.raises(ConfigError, match="link"):
        config.make_private_dir(link)


def test_children_read_what_was_written() -> None:
    quotas = {"red": SpaceQuota(memory=5)}
    broker = BrokerConfig(
        pool="p", store="5e", model_path="/m", address="ipc:///a", worker_address="ipc:///b", memory=1, workers=2, spaces=quotas
    )
    worker = WorkerConfig(store="5e", worker="w0.1", worker_address="ipc:///b", model_path="/m", cache_dir="/c", faults=("x",))
    assert config.broker_config(config.to_json(broker)) == broker
    assert config.worker_config(config.to_json(worker)) == worker
    for text in ("{", "[]", '{"pool": 1}', msgspec.json.encode({**msgspec.to_builtins(broker), "more": 1}).decode()):
        with pytest.raises(ConfigError):
            config.broker_config(text)


def test_children_share_the_defaults_of_the_pool() -> None:
    """A field that the pool and a child both have means the same; two defaults would be two truths."""
    pool = PoolConfig()
    broker = BrokerConfig(
        pool="p", store="5e", model_path="/m", address="ipc:///a", worker_address="ipc:///b", memory=1, workers=2
    )
    worker = WorkerConfig(store="5e", worker="w", worker_address="ipc:///b", model_path="/m", cache_dir="/c")
    for child in (broker, worker):
        shared = set(child.__struct_fields__) & set(pool.__struct_fields__) - {"address", "memory", "workers", "cache_dir"}
        assert {f: getattr(child, f) for f in shared} == {f: getattr(pool, f) for f in shared}


def test_example_file_is_every_setting_with_its_default(environ: dict[str, str], tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "configs" / "config.toml"
    assert config.read_file(example) == {}  # everything is commented out
    lines = example.read_text().splitlines()
    settings = [line[1:] for line in lines if line.startswith("#") and not line.startswith("# ")]
    found = config.read_file(write(tmp_path / "all.toml", "\n".join(settings)))
    assert set(found) == set(PoolConfig.__struct_fields__)
    quota = SpaceQuota(memory=1 << 30, queue=100, contexts=50)
    assert found.pop("spaces") == {"npc": quota}
    defaults = PoolConfig()
    assert found == {name: getattr(defaults, name) for name in found}

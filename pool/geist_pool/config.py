"""All settings, and the only place that reads the environment.

Where a setting may come from, strongest first: a flag of the command line, a variable ``GEIST_POOL_<SETTING>``, the TOML file
(``--config``, else ``$XDG_CONFIG_HOME/geist-pool/config.toml`` if there is one), the default below. A setting has the same name
everywhere: ``--prefill-chunk``, ``GEIST_POOL_PREFILL_CHUNK``, ``prefill_chunk = 128``.

`PoolConfig` is what a person sets. The supervisor turns it into one `BrokerConfig` and one `WorkerConfig` per worker, which
travel as JSON in the child's first argument (`to_json`, `broker_config`, `worker_config`). A child holds `parent_fd`, the read
end of a pipe: its end of file means that the supervisor is gone, and the child too has to go (`lifeline.hold`).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta, Struct

from geist_pool.errors import ConfigError
from geist_pool.store import names

ENV_PREFIX: Final = "GEIST_POOL_"
DEFAULT_POOL: Final = "default"
DEFAULT_MODEL: Final = "smollm2"
IPC_PATH_MAX: Final = 107  # bytes of sockaddr_un.sun_path on Linux, less its NUL
NAME_FORM: Final = r"\A[A-Za-z0-9][A-Za-z0-9_-]{0,31}\Z"

PoolName = Annotated[str, Meta(pattern=NAME_FORM)]
Tier = Literal["auto", "scalar", "avx2", "avx512"]
KvType = Literal["f16", "f32"]
LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Faults = tuple[str, ...]


SpaceName = Annotated[str, Meta(min_length=1, max_length=64)]


class SpaceQuota(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The most that one space may take of the pool; 0 means no limit of its own."""

    memory: Annotated[int, Meta(ge=0)] = 0  # bytes of shared memory
    queue: Annotated[int, Meta(ge=0, le=1 << 20)] = 0  # requests that may wait; one more is answered `busy`
    contexts: Annotated[int, Meta(ge=0)] = 0  # contexts at a time


class PoolConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One pool as its owner describes it. *_s are seconds, memory is bytes; 0 and "" mean "choose for me" where stated."""

    name: PoolName = DEFAULT_POOL  # a second pool of the same name refuses to start
    model: Annotated[str, Meta(min_length=1)] = DEFAULT_MODEL  # path of a GGUF, or a name that `geist-pool pull` knows
    workers: Annotated[int, Meta(ge=0, le=1024)] = 0  # 0: as many as the cores take with `threads` each
    threads: Annotated[int, Meta(ge=1, le=256)] = 1  # per worker
    slots: Annotated[int, Meta(ge=1, le=256)] = 1  # jobs that a worker holds at a time
    tier: Tier = "auto"
    kv_type: KvType = "f16"
    n_ctx: Annotated[int, Meta(ge=0, le=1 << 24)] = 0  # most positions of a session; 0: the model's
    memory: Annotated[int, Meta(ge=0)] = 0  # bytes of shared memory for contexts; 0: half of what is free in /dev/shm
    queue: Annotated[int, Meta(ge=1, le=1 << 20)] = 1024  # requests that may wait; one more is answered `busy`
    address: str = ""  # where clients connect; "": an ipc socket of the pool's name
    cache_dir: str = ""  # models and packed weights; "": $XDG_CACHE_HOME/geist-pool
    saved_dir: str = ""  # contexts that were saved to files; "": $XDG_DATA_HOME/geist-pool/saved
    ready_file: str = ""  # written when every worker has said hello, removed at the stop; "": none
    metrics: str = ""  # where Prometheus may read, e.g. 127.0.0.1:9464; "": nowhere
    spaces: dict[SpaceName, SpaceQuota] = {}  # limits of single spaces; only in the TOML file, as [spaces.NAME]
    prefill_chunk: Annotated[int, Meta(ge=1, le=65536)] = 128  # tokens between two looks at the mailbox
    heartbeat_s: Annotated[float, Meta(gt=0, le=3600)] = 1.0  # the broker pings each worker this often
    worker_timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 60.0  # silence after which a worker counts as lost
    ready_timeout_s: Annotated[float, Meta(gt=0, le=86400)] = 120.0  # from start to the last worker's first word
    stop_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 1.5  # from the polite request to SIGKILL
    max_attempts: Annotated[int, Meta(ge=1, le=16)] = 2  # workers that may die under one request
    keep_contexts: bool = False  # leave contexts in shared memory at a clean stop
    pin_cores: bool = True
    verify: bool = False  # hash the whole model file again instead of trusting size and times
    log_format: LogFormat = "console"
    log_level: LogLevel = "info"
    faults: Faults = ()  # for tests: "word" or "word=value"; each process obeys those it knows and ignores the rest


class BrokerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `python -m geist_pool.broker.main JSON` needs. Paths and addresses are absolute and final."""

    pool: str  # its name
    store: str  # `store_key` of it
    model_path: str
    address: str  # ROUTER for clients, bound by the broker
    worker_address: str  # ROUTER for workers, bound by the broker
    memory: int  # bytes, > 0
    workers: int  # how many will say hello
    slots: int = 1
    kv_type: KvType = "f16"
    n_ctx: int = 0  # 0: the model's
    queue: int = 1024
    heartbeat_s: float = 1.0
    worker_timeout_s: float = 60.0
    max_attempts: int = 2
    keep_contexts: bool = False
    saved_dir: str = ""  # directory of saved contexts, there and private; "": nothing can be saved
    bindings: str = ""  # file of what contexts are called now, for the next life; "": none
    spaces: dict[str, SpaceQuota] = {}  # by name; a space that is not here has only the pool's own limits
    log_format: LogFormat = "console"
    log_level: LogLevel = "info"
    parent_fd: int = -1  # -1: no parent to watch
    faults: Faults = ()


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `python -m geist_pool.worker.main JSON` needs. `worker` is new for every start, e.g. "w0.2": worker 0, third life."""

    store: str  # `store_key` of the pool
    worker: str
    worker_address: str  # the broker's ROUTER, to connect a DEALER to
    model_path: str
    cache_dir: str  # where the packed weights lie
    threads: int = 1
    slots: int = 1
    tier: Tier = "auto"
    kv_type: KvType = "f16"
    n_ctx: int = 0
    prefill_chunk: int = 128
    log_format: LogFormat = "console"
    log_level: LogLevel = "info"
    parent_fd: int = -1
    faults: Faults = ()


class Environment(Struct, frozen=True, kw_only=True):
    """What this program takes from the process environment."""

    runtime_dir: str | None = None  # XDG_RUNTIME_DIR
    cache_home: str  # XDG_CACHE_HOME or ~/.cache
    config_home: str  # XDG_CONFIG_HOME or ~/.config
    data_home: str  # XDG_DATA_HOME or ~/.local/share
    notify_socket: str | None = None  # NOTIFY_SOCKET: where a service manager waits to hear that the pool is ready
    index_url: str | None = None  # PIP_INDEX_URL, for fetching models without pip
    settings: dict[str, str] = {}  # GEIST_POOL_*, keys in the form of PoolConfig's fields


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """The environment, or the mapping given instead."""
    env = os.environ if environ is None else environ
    home = env.get("HOME") or str(Path("~").expanduser())
    settings = {
        key.removeprefix(ENV_PREFIX).lower(): value
        for key, value in env.items()
        if key.startswith(ENV_PREFIX) and not key.startswith((f"{ENV_PREFIX}TEST_", f"{ENV_PREFIX}CONFIG"))
    }
    return Environment(
        runtime_dir=env.get("XDG_RUNTIME_DIR") or None,
        cache_home=env.get("XDG_CACHE_HOME") or f"{home}/.cache",
        config_home=env.get("XDG_CONFIG_HOME") or f"{home}/.config",
        data_home=env.get("XDG_DATA_HOME") or f"{home}/.local/share",
        notify_socket=env.get("NOTIFY_SOCKET") or None,
        index_url=env.get("PIP_INDEX_URL") or None,
        settings=settings,
    )


# ---- where things lie ------------------------------------------------------------------------------------------------


def socket_dir(environment: Environment) -> Path:
    """Directory of the default sockets and the pools' lock files; not created here."""
    if environment.runtime_dir:
        return Path(environment.runtime_dir) / "geist-pool"
    return Path(f"/tmp/geist-pool-{os.getuid()}")


def store_key(pool: str, environment: Environment | None = None) -> str:
    """Under which the store keeps the objects of the pool of this name; see `names.store_key`."""
    directory = socket_dir(environment or read_environment())
    return names.store_key(os.getuid(), os.fsencode(os.path.realpath(directory)), pool)


def default_address(environment: Environment, pool: str) -> str:
    """The ipc address of the pool of this name.

    Raises ConfigError when the path is longer than a socket's may be.
    """
    return _checked_ipc(f"ipc://{socket_dir(environment) / pool}.ipc")


def worker_address(environment: Environment, pool: str) -> str:
    """The broker's socket for workers; always ipc, since workers share memory with the broker."""
    return _checked_ipc(f"ipc://{socket_dir(environment) / pool}.workers.ipc")


def default_cache_dir(environment: Environment) -> Path:
    return Path(environment.cache_home) / "geist-pool"


def default_saved_dir(environment: Environment) -> Path:
    return Path(environment.data_home) / "geist-pool" / "saved"


def make_private_dir(path: Path, setting: str = "address") -> None:
    """Creates the directory (0700) where it is missing; refuses one that belongs to somebody else or that others may enter.

    Raises ConfigError with the path `setting`.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as e:
        raise ConfigError(f"the directory {path} cannot be made: {e.strerror}", path=setting) from None
    if path.is_symlink() or found.st_uid != os.getuid():
        raise ConfigError(f"the directory {path} belongs to another user or is a link; nothing is put there", path=setting)
    if found.st_mode & 0o077:
        raise ConfigError(f"the directory {path} is open to other users; it must have mode 0700", path=setting)


def _checked_ipc(address: str) -> str:
    path = address.removeprefix("ipc://")
    if len(os.fsencode(path)) > IPC_PATH_MAX:
        raise ConfigError(f"the socket's path {path} is longer than {IPC_PATH_MAX} bytes", path="address")
    return address


def check_address(address: str) -> str:
    """The address if this version may listen there: ipc with an absolute path, or tcp on the loopback.

    Raises ConfigError.
    """
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path.startswith("/") or "\0" in path:
            raise ConfigError(f"an ipc address needs an absolute path: {address}", path="address")
        return _checked_ipc(address)
    if match := re.fullmatch(r"tcp://(\[[0-9a-fA-F:.]+\]|[^:/\[\]]+):(\d{1,5})", address):
        host, port = match[1], int(match[2])
        if not 1 <= port <= 65535:
            raise ConfigError(f"port {port} is not in 1 .. 65535", path="address")
        if host not in ("localhost", "[::1]") and not re.fullmatch(r"127(\.\d{1,3}){3}", host):
            raise ConfigError(
                f"{address} is reachable from other machines; that needs encryption and client keys (CURVE), "
                "which this version does not have yet",
                path="address",
            )
        return address
    raise ConfigError(f"an address is ipc:///absolute/path or tcp://127.0.0.1:PORT, not {address!r}", path="address")


def check_metrics_address(text: str) -> tuple[str, int]:
    """Host and port of the metrics address: `PORT`, `:PORT` or `HOST:PORT` with a host of the loopback; port 0 takes a free one.

    Raises ConfigError.
    """
    match = re.fullmatch(r"(?:(\[[0-9a-fA-F:]+\]|[^:\[\]/]*):)?(\d{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise ConfigError(f"metrics are served at HOST:PORT, such as 127.0.0.1:9464, not at {text!r}", path="metrics")
    host = (match[1] or "127.0.0.1").strip("[]")
    if host not in ("localhost", "::1") and not re.fullmatch(r"127(\.\d{1,3}){3}", host):
        raise ConfigError(f"metrics are served on the loopback only, not at {host}; put a proxy in front", path="metrics")
    return host, int(match[2])


# ---- loading ---------------------------------------------------------------------------------------------------------

_SIZE_UNITS: Final = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


def parse_size(value: object, path: str) -> int:
    """Bytes from an int or from text such as "512MiB", "2 GB", "1000000".

    Raises ConfigError with `path`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", value, re.IGNORECASE) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"a size is a number of bytes or text such as 512MiB or 2GB, not {value!r}", path=path)
    return int(float(match[1]) * _SIZE_UNITS[match[2].lower()])


def _hints() -> dict[str, Any]:
    return get_type_hints(PoolConfig, include_extras=True)


def _layer(origin: str, values: Mapping[str, object], *, lax: bool, shown: str = "{}") -> dict[str, object]:
    """One source's settings as checked values; `shown` is how that source spells a setting."""
    hints = _hints()
    out: dict[str, object] = {}
    for key, value in values.items():
        path = shown.format(key.upper() if lax else key)
        if key not in hints:
            known = ", ".join(sorted(hints))
            raise ConfigError(f"{origin}: there is no setting {key!r}; there are {known}", path=path)
        if key == "memory":
            value = parse_size(value, path)
        elif key == "spaces":
            value = _quotas(origin, value)
        elif key == "faults" and isinstance(value, str):
            value = [word for word in value.split(",") if word]
        try:
            out[key] = msgspec.convert(value, hints[key], strict=not lax)
        except msgspec.ValidationError as e:
            words, _, inside = str(e).partition(" - at ")
            if key == "spaces":
                words += f" (in spaces{inside.strip('`').removeprefix('$')})"
            raise ConfigError(f"{origin}: {words}, got {value!r}", path=path) from None
    return out


def _quotas(origin: str, table: object) -> object:
    """The tables [spaces.NAME] with their sizes as bytes; what is no table is left for the conversion to refuse."""
    if not isinstance(table, dict):
        raise ConfigError(f"{origin}: spaces are tables [spaces.NAME] of the config file", path="spaces")
    out = {}
    for name, quota in table.items():
        if isinstance(quota, dict) and "memory" in quota:
            quota = quota | {"memory": parse_size(quota["memory"], f"spaces.{name}.memory")}
        out[name] = quota
    return out


def read_file(path: Path) -> dict[str, object]:
    """The settings of a TOML file, checked.

    Raises ConfigError that names file and setting.
    """
    try:
        with path.open("rb") as f:
            table = tomllib.load(f)
    except OSError as e:
        raise ConfigError(f"the config file {path} cannot be read: {e.strerror}", path="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"the config file {path} is no TOML: {e}", path="config") from None
    return _layer(str(path), table, lax=False)


def load(
    flags: Mapping[str, object] | None = None, *, config_file: Path | None = None, environ: Mapping[str, str] | None = None
) -> PoolConfig:
    """Flags over environment over file over defaults; what is "choose for me" among the paths is filled in.

    flags: settings by field name; None values count as not given.
    Raises ConfigError that names the source and the setting.
    """
    env = os.environ if environ is None else environ
    environment = read_environment(env)
    if config_file is None and (named := env.get(f"{ENV_PREFIX}CONFIG")):
        config_file = Path(named)
    standard = Path(environment.config_home) / "geist-pool" / "config.toml"
    if config_file is None and standard.is_file():
        config_file = standard
    values = {} if config_file is None else read_file(config_file)
    values |= _layer("environment", environment.settings, lax=True, shown=ENV_PREFIX + "{}")
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    values |= _layer("command line", given, lax=False)
    return complete(msgspec.convert(values, PoolConfig), environment)


def complete(config: PoolConfig, environment: Environment | None = None) -> PoolConfig:
    """The same with address and directories filled in, and the name and addresses checked. Doing it twice changes nothing.

    Raises ConfigError.
    """
    environment = environment or read_environment()
    if not re.match(NAME_FORM, config.name):
        raise ConfigError("a pool's name is 1 to 32 letters, digits, - and _, and starts with a letter or digit", path="name")
    if config.metrics:
        check_metrics_address(config.metrics)
    return msgspec.structs.replace(
        config,
        address=check_address(config.address) if config.address else default_address(environment, config.name),
        cache_dir=_absolute(config.cache_dir or default_cache_dir(environment)),
        saved_dir=_absolute(config.saved_dir or default_saved_dir(environment)),
        ready_file=_absolute(config.ready_file) if config.ready_file else "",
    )


def _absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().absolute())


def shm_free_bytes() -> int:
    """Bytes free in /dev/shm now."""
    found = os.statvfs("/dev/shm")
    return found.f_bavail * found.f_frsize


# ---- what children get -----------------------------------------------------------------------------------------------


def to_json(config: BrokerConfig | WorkerConfig) -> str:
    """The form in which a child gets its configuration."""
    return msgspec.json.encode(config).decode()


def broker_config(text: str) -> BrokerConfig:
    """Raises ConfigError."""
    return _decode(text, BrokerConfig)


def worker_config(text: str) -> WorkerConfig:
    """Raises ConfigError."""
    return _decode(text, WorkerConfig)


_T = TypeVar("_T", BrokerConfig, WorkerConfig)


def _decode(text: str, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as e:
        raise ConfigError(f"the child's configuration is unreadable: {e}", path="config") from None

"""The command line: every mistake is one sentence and an exit code, never a traceback.

Property: the exit codes of docs/operations.md: 0 for success, 1 for an error of pool or model, 2 for a wrong call or setting, 5
where no pool answers, ...; errors go to stderr. Tolerance: none. Reason: scripts look at the code, people at the sentence.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from geist_pool import cli, client, commands, errors, models
from geist_pool.commands import run
from geist_pool.signals import Interrupted

Outcome = tuple[int, str, str]


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the user's is read or written."""
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A server sets up the process's logging, to this test's stderr; the next test has another one."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def gp(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def call(*words: str) -> Outcome:
        code = run(words)
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


def test_help_tells_the_first_steps(gp: Callable[..., Outcome]) -> None:
    code, out, _ = gp("--help")
    assert code == 0
    for word in (
        "geist-pool demo",
        "contexts create",
        "--workers",
        "--model",
        "Commands:",
        "pull",
        "info",
        "stats",
        "models",
        "top",
        "story",
    ):
        assert word in out
    for command in ("demo", "pull", "info", "ask", "contexts", "stats", "models", "top", "story"):
        code, out, _ = gp(command, "--help")
        assert code == 0 and out.startswith(f"Usage: geist-pool {command}")


def test_every_setting_has_an_option_or_is_for_experts() -> None:
    """A new setting must be given an option or be named here."""
    from geist_pool.config import PoolConfig

    experts = {"heartbeat_s", "worker_timeout_s", "ready_timeout_s", "stop_timeout_s", "max_attempts", "pin_cores", "faults"}
    experts |= {"spaces"}  # tables of the config file
    assert {p.name for p in commands.main.params} - {"config", "version"} == set(PoolConfig.__struct_fields__) - experts


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("--workers", "x"), 2, "not a valid integer"),
        (("--nonsense",), 2, "No such option"),
        (("nonsense",), 2, "No such command"),
        (("--workers", "-3", "stats"), 2, "--workers is an option of the server"),
        (("--workers", "-3"), 2, "(at workers)"),
        (("--memory", "much"), 2, "a size is"),
        (("--name", "a/b", "stats"), 2, "(at name)"),
        (("--address", "tcp://0.0.0.0:1"), 2, "reachable from other machines"),
        (("--config", "/none.toml", "stats"), 2, "cannot be read"),
        (("--model", "/none.gguf"), 2, "there is no model file /none.gguf"),
        (("pull", "nonsense"), 1, "no model 'nonsense'"),
        (("pull", "hf:a/b"), 1, "hf:OWNER/REPO/FILE.gguf"),
        (("--model", "hf:a/../b.gguf"), 1, "hf:OWNER/REPO/FILE.gguf"),
        (("info", "hf:a/b/c.gguf"), 2, "geist-pool pull hf:a/b/c.gguf"),
        (("--metrics", "0.0.0.0:9464"), 2, "loopback only"),
        (("top", "--interval", "0"), 2, "range"),
        (("info", "/none.gguf"), 2, "there is no model file"),
        (("info", "smollm2"), 2, "geist-pool pull smollm2"),
    ],
)
def test_mistakes(gp: Callable[..., Outcome], words: tuple[str, ...], code: int, sentence: str) -> None:
    got, out, err = gp(*words)
    assert (got, out) == (code, "")
    assert sentence in " ".join(err.split())


def test_no_pool_is_a_sentence(gp: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = partial(client.Client, connect_timeout=0.01)
    monkeypatch.setattr(client, "Client", impatient)
    calls = [("stats",), ("contexts",), ("ask", "hello"), ("story", "x"), ("top", "--once")]
    calls += [("contexts", *words) for words in (("drop", "x"), ("save", "x"), ("load", "x"), ("saved",), ("ls",))]
    for words in calls:
        code, out, err = gp(*words)
        assert (code, out) == (5, "")
        assert err.startswith("error: there is no pool at ipc://")


def test_info_of_every_architecture(gp: Callable[..., Outcome], tiny_model: Callable[..., Path]) -> None:
    for name, architecture in (("llama-tiny", "llama"), ("qwen3-tiny", "qwen3"), ("qwen35-tiny", "qwen35")):
        code, out, err = gp("info", str(tiny_model(name)))
        assert (code, err) == (0, "")
        lines = {line.split("  ")[0]: line.split("  ", 1)[1].strip() for line in out.splitlines()}
        assert lines["architecture"] == architecture
        assert lines["supported"] == "yes"
        assert "fixed and" in lines["state"]


def test_info_says_what_is_unsupported(gp: Callable[..., Outcome], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    whole = tiny_model("llama-tiny").read_bytes()
    odd = tmp_path / "odd.gguf"
    odd.write_bytes(
        whole.replace(
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama", b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0lxama"
        )
    )
    code, out, err = gp("info", str(odd))
    assert code == 1
    assert "lxama" in out and "supported" in out
    assert err.startswith("error: this model cannot be served") and "lxama" in err
    (tmp_path / "cut.gguf").write_bytes(whole[:1000])
    code, out, err = gp("info", str(tmp_path / "cut.gguf"))
    assert code == 1 and err.startswith("error: ")


def test_pull_prints_the_path(gp: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "pull", lambda name, cache, progress: cache / "models" / f"{name}.gguf")
    code, out, _ = gp("--cache-dir", str(tmp_path), "pull", "smollm2")
    assert (code, out) == (0, f"{tmp_path}/models/smollm2.gguf\n")
    code, out, err = gp("--cache-dir", str(tmp_path), "pull", "gemma3-270m")
    assert (code, out) == (0, f"{tmp_path}/models/gemma3-270m.gguf\n")
    assert "Gemma Terms of Use" in err  # before anything is fetched


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_refused(platform: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capfd.readouterr().err.startswith("geist-pool runs on Linux only")


def test_models_lists_catalogue_and_cache(gp: Callable[..., Outcome], tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / f"{'ab' * 16}-l1-n1.packed").write_bytes(bytes(2048))
    (packed / "lock").write_text("")
    (tmp_path / "models").mkdir()
    code, out, _ = gp("--cache-dir", str(tmp_path), "models")
    assert code == 0 and "smollm2" in out and "gemma3-270m" in out and " no " in out
    assert "ab" * 16 in out and "2.0 KiB" in out and "lock" not in out
    (tmp_path / "models" / "smollm2.gguf").write_bytes(bytes(1024))
    code, out, _ = gp("--cache-dir", str(tmp_path), "models")
    assert code == 0 and " yes " in out and "1.0 KiB" in out


def test_exit_codes_tell_what_happened() -> None:
    expected = {
        errors.NameTaken: 3,
        errors.ConfigError: 2,
        errors.PoolLost: 4,
        errors.NoAnswer: 5,
        errors.Internal: 1,
        errors.DownloadError: 1,
    }
    assert {kind: commands.exit_code(kind("words")) for kind in expected} == expected


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (Interrupted(15), 143), (Interrupted(1), 129)])
def test_signal_before_the_end_is_128_and_its_number(
    gp: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def interrupted(*_: object) -> None:
        raise error

    monkeypatch.setattr(commands.terminal, "pull", interrupted)
    assert gp("pull", "smollm2")[0] == code
    assert gp("--model", "smollm2")[0] == code  # a server that was not ready yet


@pytest.mark.parametrize("words", [("--help",), ("info", "{model}")])
def test_a_full_disk_behind_standard_output_is_a_sentence(words: tuple[str, ...], tiny_model: Callable[..., Path]) -> None:
    model = str(tiny_model("llama-tiny"))
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", "from geist_pool.cli import main; main()", *(w.format(model=model) for w in words)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr.strip() == "error: No space left on device"

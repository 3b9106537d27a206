"""The command line: every mistake is one sentence and an exit code, never a traceback.

Property: exit code 0 for success, 1 for an error of pool or model, 2 for a wrong call or setting; errors go to stderr. Tolerance:
none. Reason: scripts look at the code, people at the sentence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from geist_pool import cli, commands, models
from geist_pool.commands import run

Outcome = tuple[int, str, str]


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the user's is read or written."""
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


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
    for word in ("geist-pool demo", "contexts create", "--workers", "--model", "Commands:", "pull", "info", "stats"):
        assert word in out
    for command in ("demo", "pull", "info", "ask", "contexts", "stats"):
        code, out, _ = gp(command, "--help")
        assert code == 0 and out.startswith(f"Usage: geist-pool {command}")


def test_every_setting_has_an_option_or_is_for_experts() -> None:
    """A new setting must be given an option or be named here."""
    from geist_pool.config import PoolConfig

    experts = {"heartbeat_s", "worker_timeout_s", "ready_timeout_s", "stop_timeout_s", "max_attempts", "pin_cores", "faults"}
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
        (("info", "/none.gguf"), 2, "there is no model file"),
        (("info", "smollm2"), 2, "geist-pool pull smollm2"),
    ],
)
def test_mistakes(gp: Callable[..., Outcome], words: tuple[str, ...], code: int, sentence: str) -> None:
    got, out, err = gp(*words)
    assert (got, out) == (code, "")
    assert sentence in " ".join(err.split())


def test_no_pool_is_a_sentence(gp: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "Client", lambda *a, **k: commands_client(*a, **k))
    for words in (("stats",), ("contexts",), ("contexts", "drop", "x"), ("ask", "hello")):
        code, out, err = gp(*words)
        assert (code, out) == (1, "")
        assert err.startswith("error: there is no pool at ipc://")


def commands_client(*args: object, **kwargs: object) -> object:
    from geist_pool.client import Client

    return Client(*args, **kwargs, connect_timeout=0.01)  # type: ignore[arg-type]


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

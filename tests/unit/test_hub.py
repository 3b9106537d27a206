"""Models from the hub, served here by a small server that answers as the hub does.

Property: a file gets its name in the cache only if size and hash are those that the hub told before; a fetch that was cut off
goes on where it stopped; every failure is a DownloadError. Tolerance: none. Reason: a half or wrong model would be used for
ever. No network is used.
"""

from __future__ import annotations

import hashlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from geist_pool import cached, hub, models
from geist_pool.errors import ConfigError, DownloadError

CONTENT = b"GGUF" + os.urandom(1 << 16) * 360  # the library writes pieces of 10 MB
SHA256 = hashlib.sha256(CONTENT).hexdigest()
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REF = "hf:some-owner/some.repo/sub/toy-q8.gguf"


class Hub:
    """What the server answers, and what it was asked."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.etag = SHA256
        self.size = len(CONTENT)
        self.error: tuple[int, str] | None = None
        self.stall_at = 0  # bytes after which the next GET says nothing more
        self.over = threading.Event()
        self.ranges: list[str | None] = []  # of each GET
        self.heads = 0
        self.url = ""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    state = Hub()
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def start(self, status: int, n_bytes: int, first: int = 0) -> bool:
            known = any(
                self.path == f"/some-owner/some.repo/resolve/{revision}/sub/toy-q8.gguf" for revision in ("main", "v1", COMMIT)
            )
            if state.error is not None or not known:
                status, code = state.error or (404, "EntryNotFound")
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return False
            self.send_response(status)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-Etag", f'"{state.etag}"')
            self.send_header("X-Linked-Size", str(state.size))
            self.send_header("ETag", '"of-the-pointer"')
            self.send_header("Accept-Ranges", "bytes")
            if status == 206:
                self.send_header("Content-Range", f"bytes {first}-{len(state.content) - 1}/{len(state.content)}")
            self.send_header("Content-Length", str(n_bytes))
            self.end_headers()
            return True

        def do_HEAD(self) -> None:
            state.heads += 1
            self.start(200, len(state.content))

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:  # of the process that is killed
                return

        def do_GET(self) -> None:
            wanted = self.headers["Range"]
            state.ranges.append(wanted)
            first = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
            body = state.content[first:]
            if self.start(206 if first else 200, len(body), first):
                if state.stall_at:
                    body, state.stall_at = body[: state.stall_at], 0
                    self.wfile.write(body)
                    state.over.wait(60)
                    self.close_connection = True
                else:
                    self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        http_server.daemon_threads = True
        state.url = f"http://127.0.0.1:{http_server.server_address[1]}"
        thread = threading.Thread(target=http_server.serve_forever, args=(0.02,))
        thread.start()
        yield state
        state.over.set()
        http_server.shutdown()
        thread.join()


def pull(server: Hub, cache: Path, ref: str = REF, **options: object) -> Path:
    return hub.pull(ref, cache, endpoint=server.url, **options)  # type: ignore[arg-type]


def files(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "models" / "hf").rglob("*") if p.is_file()) if cache.exists() else []


def test_fetched_once_checked_and_listed(server: Hub, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    path = pull(server, tmp_path / "c", progress=lambda *c: calls.append(c))
    assert path.read_bytes() == CONTENT
    assert path == models.resolve(REF, tmp_path / "c") == models.model_path(REF, tmp_path / "c")
    assert calls[-1] == ("checking", len(CONTENT), len(CONTENT)) and calls[0] == ("fetching", 0, len(CONTENT))
    asked = server.heads
    assert pull(server, tmp_path / "c") == path and server.heads == asked
    assert not (tmp_path / "c" / "models" / ".hub" / "some-owner" / "some.repo" / "main").exists()
    found = {m.name: m for m in cached.list_models(tmp_path / "c")}
    assert (found[REF].path, found[REF].n_bytes, found[REF].about) == (path, len(CONTENT), f"commit {COMMIT[:12]}")
    assert found["smollm2"].path is None and found["gemma3-270m"].path is None


def test_revisions_lie_apart(server: Hub, tmp_path: Path) -> None:
    one, two = pull(server, tmp_path / "c"), pull(server, tmp_path / "c", "hf:some-owner/some.repo@v1/sub/toy-q8.gguf")
    assert one != two and one.read_bytes() == two.read_bytes()


def test_interrupted_fetch_goes_on_where_it_stopped(server: Hub, tmp_path: Path) -> None:
    """A try in a process that is killed; the next one asks for the rest only."""
    server.stall_at = len(CONTENT) - (1 << 20)
    code = f"""
import os
from pathlib import Path
from geist_pool import hub
def told(what, done, total):
    if what == "fetching" and done >= {10 << 20}:
        os._exit(9)
hub.POLL_S = 0.01
hub.pull({REF!r}, Path({str(tmp_path / "c")!r}), progress=told)
"""
    env = {**os.environ, "HF_ENDPOINT": server.url}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    partial = list((tmp_path / "c" / "models" / ".hub").rglob("*.part"))
    assert files(tmp_path / "c") == []
    assert done.returncode == 9 and len(partial) == 1, done.stderr
    there = partial[0].stat().st_size
    assert 0 < there < len(CONTENT)
    server.ranges.clear()
    assert pull(server, tmp_path / "c").read_bytes() == CONTENT
    assert server.ranges[0] is not None and server.ranges[0].startswith(f"bytes={there}-")


def test_what_is_not_the_file_is_not_kept(server: Hub, tmp_path: Path) -> None:
    server.content = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    with pytest.raises(DownloadError, match="are expected; not kept"):
        pull(server, tmp_path / "c")
    assert files(tmp_path / "c") == []
    with pytest.raises(ConfigError, match="geist-pool pull hf:some-owner"):
        models.resolve(REF, tmp_path / "c")
    server.content = CONTENT
    assert pull(server, tmp_path / "c").read_bytes() == CONTENT  # nothing of the wrong one is gone on with


def test_file_outside_lfs_has_gits_hash(server: Hub, tmp_path: Path) -> None:
    server.etag = hashlib.sha1(b"blob %d\0" % len(CONTENT) + CONTENT).hexdigest()
    assert pull(server, tmp_path / "c").read_bytes() == CONTENT
    server.etag = "0" * 40
    with pytest.raises(DownloadError, match="not kept"):
        pull(server, tmp_path / "d")
    server.etag = "weak"
    with pytest.raises(DownloadError, match="unknown kind"):
        pull(server, tmp_path / "e")


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "RepoNotFound", "no repository some-owner/some.repo"),
        (403, "GatedRepo", "asks for consent"),
        (404, "RevisionNotFound", "no revision main"),
        (404, "EntryNotFound", "no file sub/toy-q8.gguf"),
        (500, "", "could not be fetched from the hub"),
    ],
)
def test_refusals_are_sentences(server: Hub, tmp_path: Path, status: int, code: str, words: str) -> None:
    server.error = (status, code)
    with pytest.raises(DownloadError, match=words):
        pull(server, tmp_path / "c")
    assert files(tmp_path / "c") == []


def test_no_hub_at_all(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="could not be fetched from the hub"):
        hub.pull(REF, tmp_path, endpoint="http://127.0.0.1:1")


@pytest.mark.parametrize(
    "text",
    [
        *("hf:", "hf:a/b", "hf:a/b/c", "hf:a/b/c.bin", "hf:../b/c.gguf", "hf:a/b/../c.gguf", "hf:a/b//c.gguf", "hf:a/.b/c.gguf"),
        *("hf:a/b/.c.gguf", "hf:a/b@/c.gguf", "hf:a/b@../c.gguf", "hf:a/b/c\0.gguf", "hf:a/b/c.gguf\n", "hf:/a/b/c.gguf"),
    ],
)
def test_names_that_are_none(text: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="a model of the hub is"):
        models.pull(text, tmp_path)
    with pytest.raises(DownloadError):
        models.resolve(text, tmp_path)

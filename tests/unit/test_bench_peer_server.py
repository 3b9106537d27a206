"""Properties of the driver of llama-server, against a program that speaks like one: it waits until the model is loaded, sends
token ids with the cache on and one slot, reads what was prefilled and what was not, says why it gives up, and leaves no process.
Tolerance: none; nothing is computed.
"""

from __future__ import annotations

import importlib
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
try:
    server: Any = importlib.import_module("bench.peers.server")
finally:
    sys.path.remove(str(ROOT))

FAKE = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
asked = []

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        asked.append(self.path)
        self.reply(200 if len(asked) > 2 else 503, {{}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if 0 in body["prompt"]:
            self.reply(400, {{"error": "token 0"}})
        elif 1 in body["prompt"]:
            self.reply(200, {{"content": "x"}})
        else:
            right = body["cache_prompt"] and body["id_slot"] == 0 and body["temperature"] == 0 and args["--parallel"] == "1"
            n = len(body["prompt"])
            self.reply(200, {{"tokens": [n, int(right), int(args["--threads"])], "timings": {{
                "prompt_n": n - 2, "cache_n": 2, "prompt_ms": 1500.0, "predicted_ms": 20.0}}}})

    def log_message(self, *_):
        pass

if "--fail" in sys.argv:
    sys.exit("no such model")
if "--version" in sys.argv:
    print("version: 1 (abc)")
    sys.exit()
HTTPServer(("127.0.0.1", int(args["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that behaves as llama-server does; loading takes it three questions."""
    path = tmp_path / "llama-server"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_it_waits_asks_and_stops(program: Path, tmp_path: Path) -> None:
    with server.running(program, tmp_path / "m.gguf", threads=3, n_ctx=4096) as caller:
        first = caller.complete([5, 6, 7])
        again = caller.complete([5, 6, 7, 8], n_predict=2)
        port = caller._connection.port
    assert first == server.Answer(tokens=(3, 1, 3), prompt_n=1, cache_n=2, prompt_s=1.5, predicted_s=0.02)
    assert again.prompt_n == 2
    assert not server.Caller(port, timeout=1.0).healthy()


def test_an_error_or_half_an_answer_is_said(program: Path, tmp_path: Path) -> None:
    with server.running(program, tmp_path / "m.gguf", threads=1, n_ctx=4096) as caller:
        with pytest.raises(server.PeerError, match=r"answered 400.*token 0"):
            caller.complete([0])
        with pytest.raises(server.PeerError, match=r"lacks something.*timings"):
            caller.complete([1])
        assert caller.complete([5, 6, 7]).cache_n == 2


def test_one_that_ends_or_never_gets_ready_says_why(program: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(server.PeerError, match=r"status 1:\nno such model"),
        server.running(program, tmp_path / "m.gguf", threads=1, n_ctx=8, options=["--fail"]),
    ):
        pass
    with (
        pytest.raises(server.PeerError, match="not ready after 0 s"),
        server.running(program, tmp_path / "m.gguf", threads=1, n_ctx=8, ready_s=0.0),
    ):
        pass


def test_where_it_is(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert server.find(None) is None
    assert server.find(str(program)) == program.resolve()
    with pytest.raises(server.PeerError, match="no program"):
        server.find("/nowhere/llama-server")
    monkeypatch.setenv("PATH", str(program.parent))
    assert server.find(None) == program.resolve()
    assert server.version(program) == "version: 1 (abc)"

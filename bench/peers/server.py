"""llama-server as a side of a measurement: started on a port of the loopback, asked, stopped.

How to build it: bench/peers/README.md. One slot, its prompt cache on, prompts as token ids, and everything else as it comes.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.harness import BenchError

HOST: Final = "127.0.0.1"
READY_S: Final = 180.0  # it loads the model and runs a pass to warm up before /health is 200
ANSWER_S: Final = 300.0
STOP_S: Final = 10.0
SLOT: Final = 0


class PeerError(BenchError):
    """The peer did not start, or did not answer as it should."""


class Answer(NamedTuple):
    """What came back. prompt_n: tokens that were prefilled; cache_n: tokens that were not; the times are the server's own."""

    tokens: tuple[int, ...]
    prompt_n: int
    cache_n: int
    prompt_s: float
    predicted_s: float


class Caller:
    """Asks a running llama-server, over a new connection each time: it closes one that has been idle for some seconds, and a
    connection over the loopback costs some dozen microseconds."""

    def __init__(self, port: int, *, timeout: float = ANSWER_S) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=timeout)

    def healthy(self) -> bool:
        """Whether it is up and has loaded the model."""
        try:
            status, _ = self._ask("GET", "/health")
        except (OSError, http.client.HTTPException):
            return False
        return status == 200

    def complete(self, prompt: Sequence[int], n_predict: int = 1) -> Answer:
        """Continues token ids greedily. Raises PeerError where that is not what came back."""
        body = json.dumps(
            {
                "prompt": list(prompt),
                "n_predict": n_predict,
                "temperature": 0,
                "cache_prompt": True,
                "id_slot": SLOT,
                "return_tokens": True,
            }
        ).encode()
        try:
            status, reply = self._ask("POST", "/completion", body)
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"llama-server gave no answer: {error or type(error).__name__}") from error
        if status != 200:
            raise PeerError(f"llama-server answered {status}: {reply[:300].decode(errors='replace')}")
        try:
            return _answer(json.loads(reply))
        except (ValueError, KeyError, TypeError) as error:
            raise PeerError(f"llama-server's answer lacks something: {error!r}") from error

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            self._connection.request(method, path, body, headers)
            reply = self._connection.getresponse()
            return reply.status, reply.read()
        finally:
            self._connection.close()


def _answer(reply: dict[str, Any]) -> Answer:
    timings = reply["timings"]
    return Answer(
        tokens=tuple(reply.get("tokens", ())),
        prompt_n=int(timings["prompt_n"]),
        cache_n=int(timings["cache_n"]),
        prompt_s=float(timings["prompt_ms"]) * 1e-3,
        predicted_s=float(timings["predicted_ms"]) * 1e-3,
    )


@contextmanager
def running(
    program: Path, model: Path, *, threads: int, n_ctx: int, options: Sequence[str] = (), ready_s: float = READY_S
) -> Iterator[Caller]:
    """A llama-server that has loaded the model, with one slot of n_ctx tokens. Raises PeerError with the end of its log."""
    port = _free_port()
    command = [
        str(program), "--model", str(model), "--host", HOST, "--port", str(port), "--threads", str(threads),
        "--threads-batch", str(threads), "--ctx-size", str(n_ctx), "--parallel", "1", "--no-webui", *options,
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        caller = Caller(port)
        try:
            deadline = time.monotonic() + ready_s
            while not caller.healthy():
                if process.poll() is not None:
                    raise PeerError(f"llama-server ended with status {process.returncode}:\n{_tail(log)}")
                if time.monotonic() > deadline:
                    raise PeerError(f"llama-server was not ready after {ready_s:.0f} s:\n{_tail(log)}")
                time.sleep(0.05)
            yield caller
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(log: Any) -> str:
    log.seek(0)
    return log.read()[-2000:].decode(errors="replace").strip()


def find(named: str | None) -> Path | None:
    """The program: the one named, else the one in PATH, else None. Raises PeerError if the one named is none."""
    found = shutil.which(named or "llama-server")
    if found is None and named is not None:
        raise PeerError(f"{named} is no program")
    return Path(found).resolve() if found is not None else None


def version(program: Path) -> str:
    """What it calls itself, in one line."""
    shown = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=60, check=False)
    return ", ".join(line.strip() for line in (shown.stdout + shown.stderr).splitlines() if line.strip())[:300]

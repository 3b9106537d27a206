"""llama.cpp in a process of its own, as a side of a measurement: the best loop one can write on its C API.

How to build it: bench/peers/README.md. The process (llama_child.py) runs with any Python that has llama-cpp-python, named by
`--peer-python`; it computes only while it is asked, and its times are its own, taken around the calls of the C API, so that
neither this pipe nor JSON is part of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

from bench.peers.server import PeerError

NAME: Final = "llama.cpp"
CHILD: Final = Path(__file__).with_name("llama_child.py")
STOP_S: Final = 10.0


class Passed(NamedTuple):
    """Seconds of a pass (or of each of several) and the likeliest next token."""

    seconds: float
    token: int


class LlamaPeer:
    """One model in one child. Raises PeerError where the child does not start or does not answer as it should."""

    def __init__(self, python: str | None = None, *, child: Path = CHILD) -> None:
        self._python = python or sys.executable
        self._child_path = child
        self._child: subprocess.Popen[str] | None = None
        self.about: dict[str, Any] = {}  # what `load` replied: version, system, n_ubatch, ...

    def __enter__(self) -> LlamaPeer:
        command = [self._python, str(self._child_path)]
        try:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
            )
        except OSError as error:
            raise PeerError(f"{self._python} does not start: {error.strerror}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None and child.stdout is not None
        with suppress(BrokenPipeError):
            child.stdin.close()  # it ends with its input
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()

    def load(self, model: Path, *, threads: int, n_ctx: int, n_batch: int = 2048) -> dict[str, Any]:
        """Loads the model and makes its one context; what the engine says about itself."""
        self.about = self._ask("load", model=str(model), threads=threads, n_ctx=n_ctx, n_batch=n_batch)
        return self.about

    def set_threads(self, threads: int) -> None:
        """Of the passes from now on."""
        self._ask("set_threads", threads=threads)

    def prefill(self, tokens: Iterable[int]) -> Passed:
        """The sequence becomes these tokens."""
        reply = self._ask("prefill", tokens=[int(t) for t in tokens])
        return Passed(reply["seconds"], reply["token"])

    def decode(self, tokens: Iterable[int]) -> tuple[list[float], int]:
        """Takes in these tokens one by one: seconds of each, and the likeliest token behind the last."""
        reply = self._ask("decode", tokens=[int(t) for t in tokens])
        return reply["seconds"], reply["token"]

    def state_save(self) -> tuple[float, int]:
        """Saves the sequence's state in the child's memory: seconds, bytes."""
        reply = self._ask("state_save")
        return reply["seconds"], reply["bytes"]

    def state_load(self) -> float:
        """The sequence becomes what was saved: seconds."""
        return float(self._ask("state_load")["seconds"])

    def decide(self, tokens: Iterable[int], n: int = 1) -> tuple[float, list[int]]:
        """State, suffix, `n` greedy tokens: seconds of all of it, and the tokens."""
        reply = self._ask("decide", tokens=[int(t) for t in tokens], n=n)
        return reply["seconds"], reply["tokens"]

    def _ask(self, what: str, **request: Any) -> dict[str, Any]:
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None, "use it in a `with`"
        try:
            child.stdin.write(json.dumps({"do": what, **request}) + "\n")
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"{self._python} has no llama_cpp, or it ended")
        reply: dict[str, Any] = json.loads(line)
        if not reply.pop("ok"):
            raise PeerError(reply["error"])
        return reply


def add_argument(parser: argparse.ArgumentParser) -> None:
    """--peer-python and --no-peer."""
    parser.add_argument("--peer-python", metavar="PATH", help="a Python with llama-cpp-python; default: this one")
    parser.add_argument("--no-peer", action="store_true", help="measure without llama.cpp")


def opened(stack: ExitStack, args: Any, model: Path, *, threads: int, n_ctx: int) -> tuple[LlamaPeer | None, dict[str, Any]]:
    """The peer with the model loaded, closed by `stack`; None where there is none, which is said once on stderr. And the words
    for a report's settings."""
    if args.no_peer:
        return None, {"peer": "none, by request"}
    try:
        peer = stack.enter_context(LlamaPeer(args.peer_python))
        about = peer.load(model, threads=threads, n_ctx=n_ctx)
    except PeerError as error:
        print(f"measured without {NAME}: {error} (bench/peers/README.md)", file=sys.stderr)
        return None, {"peer": f"none: {error}"}
    return peer, {"peer": f"{NAME} of llama-cpp-python {about['version']}", "peer_system": about["system"]}

"""A worker process: `python -m geist_pool.worker.main CONFIG`, where CONFIG is a WorkerConfig as JSON.

It loads the model, says hello to the broker and works until the broker says stop or the process that started it is gone. It
imports no tokenizer: token ids come in, token ids and bytes go out.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType

import msgspec
import numpy  # noqa: F401  # before the first request rather than in it: the engine imports it when it is called

from geist_pool import lifeline
from geist_pool.config import WorkerConfig, worker_config
from geist_pool.engine import Engine, Model
from geist_pool.errors import GeistPoolError
from geist_pool.store import unfinished
from geist_pool.store.shm import allow_many_mappings
from geist_pool.worker.loop import serve

_log = logging.getLogger("geist_pool.worker")


def main(argv: list[str]) -> int:
    """The process's exit status: 0 after a stop, 1 after an error, 2 for a wrong call."""
    if len(argv) != 2:
        print("usage: python -m geist_pool.worker.main CONFIG", file=sys.stderr)
        return 2
    try:
        config = worker_config(argv[1])
        _set_up_logging(config)
        lifeline.hold(config.parent_fd, _orphaned)
        allow_many_mappings()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the supervisor's to handle
        signal.signal(signal.SIGTERM, _stop_starting)
        with (
            Engine(config.tier, config.threads) as engine,
            Model(engine, config.model_path, cache_dir=config.cache_dir) as model,
        ):
            signal.signal(signal.SIGTERM, _stop)
            _log.info("%s is ready: %s, tier %s", config.worker, model.info.architecture, engine.tier)
            serve(config, model)
    except GeistPoolError as error:
        _log.error("%s: %s", error.code, error)
        return 1
    return 0


def _orphaned() -> None:
    """The pool is gone: what is half-written goes now, and the process without waiting for the pass that it is in."""
    unfinished.undo_all()
    os._exit(0)


def _stop_starting(number: int, frame: FrameType | None) -> None:
    """Nobody waits for anything from a worker that has not said hello; half an engine cannot be closed in order."""
    _orphaned()


def _stop(number: int, frame: FrameType | None) -> None:
    """Leaves through every `with` on the way, so that unsealed objects go."""
    raise SystemExit(0)


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "worker": self._worker,
            "event": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _set_up_logging(config: WorkerConfig) -> None:
    handler = logging.StreamHandler()
    console = logging.Formatter(f"%(asctime)s %(levelname)-7s {config.worker} %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonLines(config.worker) if config.log_format == "json" else console)
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))

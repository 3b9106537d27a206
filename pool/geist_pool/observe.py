"""Logs: events with counts and ids, never a client's text.

Everything goes to stderr, one event a line, for a person or as JSON. Records of the standard `logging` module (the engine's and
the store's) take the same way.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from geist_pool.config import LogFormat, LogLevel


def set_up(process: str, *, log_format: LogFormat = "console", log_level: LogLevel = "info") -> None:
    """Sets up logging for this process; `process` ("pool", "broker", ...) stands on every line."""

    def name(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["process"] = process
        return event

    last: structlog.typing.Processor
    if log_format == "json":
        last = structlog.processors.JSONRenderer()
    else:
        last = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0, sort_keys=False)
    steps: list[structlog.typing.Processor] = [
        name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if log_format == "json" else "%H:%M:%S", utc=log_format == "json"),
        structlog.processors.format_exc_info,
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        last,
    ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=steps))
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger for events: `logger("supervisor").info("worker started", worker="w1", pid=123)`.

    Without `set_up` (in a program that embeds the pool) its records go wherever that program's `logging` sends them.
    """
    found: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(f"geist_pool.{name}"),
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    return found

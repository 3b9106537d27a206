"""Logs: events with counts and ids, never a client's text.

Everything goes to stderr, one event a line, for a person or as JSON. Records of the standard `logging` module (the engine's and the
store's) take the same way.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, cast

import structlog

from geist_pool.config import LogFormat, LogLevel


def set_up(process: str, *, log_format: LogFormat = "console", log_level: LogLevel = "info") -> None:
    """Sets up logging for this process; `process` ("pool", "broker", ...) stands on every line."""

    def name(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["process"] = process
        return event

    shared: list[structlog.typing.Processor] = [
        name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if log_format == "json" else "%H:%M:%S", utc=log_format == "json"),
        structlog.processors.format_exc_info,
    ]
    last: structlog.typing.Processor
    if log_format == "json":
        last = structlog.processors.JSONRenderer()
    else:
        last = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0, sort_keys=False)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, last]
        )
    )
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger for events: `logger("supervisor").info("worker started", worker="w1", pid=123)`."""
    return cast(structlog.stdlib.BoundLogger, structlog.stdlib.get_logger(f"geist_pool.{name}"))

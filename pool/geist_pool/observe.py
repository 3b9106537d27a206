"""Logs: events with counts and ids, never a client's text.

Everything goes to stderr, one event a line, for a person or as JSON. Records of the standard `logging` module (the engine's and
the store's) take the same way. Built on that module alone: whatever is imported here, a pool's start waits for twice, in the
supervisor and in the broker.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from geist_pool.config import LogFormat, LogLevel

FIELDS: Final = "geist_pool_fields"  # of a record: an event's values by name


class Logger:
    """Writes events: `logger("supervisor").info("worker started", worker="w1", pid=123)`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"geist_pool.{name}")

    def debug(self, event: str, **values: Any) -> None:
        self._write(logging.DEBUG, event, values)

    def info(self, event: str, **values: Any) -> None:
        self._write(logging.INFO, event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._write(logging.WARNING, event, values)

    def error(self, event: str, **values: Any) -> None:
        self._write(logging.ERROR, event, values)

    def _write(self, level: int, event: str, values: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            # In a program that embeds the pool and has not called `set_up` the values stand in the message as well.
            self._logger.log(level, "%s", _Words(event, values), extra={FIELDS: (event, values)})


class _Words:
    """An event as one line, made only if somebody writes it."""

    def __init__(self, event: str, values: Mapping[str, Any]) -> None:
        self._event, self._values = event, values

    def __str__(self) -> str:
        return " ".join([self._event, *(f"{name}={_shown(value)}" for name, value in self._values.items())])


def _shown(value: Any) -> str:
    """A value that can be told from its neighbours: quoted where it holds a space, a quote or a line's end."""
    text = str(value)
    return text if text and text.isprintable() and not any(c in " '\"" for c in text) else repr(text)


class _Console(logging.Formatter):
    """For a person: `12:30:01 [info   ] started child=w0 life=0 process=pool`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def formatMessage(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{at} [{record.levelname.lower():<7}] {record.message} process={self._process}"


class _JsonLines(logging.Formatter):
    """For a program: one JSON object a line, an event's values as its fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields: tuple[str | None, dict[str, Any]] = getattr(record, FIELDS, (None, {}))
        event, values = fields
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            **values,
            "process": self._process,
            "event": record.getMessage() if event is None else event,
            "level": record.levelname.lower(),
            "timestamp": f"{at}.{int(record.created % 1 * 1e6):06d}Z",
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def set_up(process: str, *, log_format: LogFormat = "console", log_level: LogLevel = "info") -> None:
    """Sets up logging for this process; `process` ("pool", "broker", ...) stands on every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(process) if log_format == "json" else _Console(process))
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)


def logger(name: str) -> Logger:
    """The logger for one part's events. Without `set_up` they go wherever the program's `logging` sends them."""
    return Logger(name)

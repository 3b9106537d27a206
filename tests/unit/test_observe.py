"""Logs: one event a line with its values, for a person and as JSON, also through the standard module's own records; what is below
the level is not written, and a value cannot end a line or be taken for another. Tolerance: none, but for the time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from geist_pool import observe


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_lines_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    observe.set_up("pool", log_level="info")
    log = observe.logger("supervisor")
    log.info("started", child="w0", pid=7, cpus=[0, 1], path=Path("/a b"), empty="", text="one\ntwo=3")
    log.debug("not written", n=1)
    logging.getLogger("geist_pool.engine").warning("packing %s", "x.gguf")
    first, second = capsys.readouterr().err.splitlines()
    assert first[8:] == " [info   ] started child=w0 pid=7 cpus='[0, 1]' path='/a b' empty='' text='one\\ntwo=3' process=pool"
    assert second[8:] == " [warning] packing x.gguf process=pool"


def test_lines_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    observe.set_up("broker", log_format="json", log_level="warning")
    before = datetime.now(UTC)
    observe.logger("broker").error("ends", code="x", path=Path("/a"), n=2)
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("other").exception("it %s", "failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    at = datetime.fromisoformat(first.pop("timestamp"))
    assert abs((at - before).total_seconds()) < 60
    assert first == {"event": "ends", "code": "x", "path": "/a", "n": 2, "process": "broker", "level": "error"}
    assert second["event"] == "it failed" and second["exception"].endswith("ValueError: why")


def test_without_set_up_the_values_stand_in_the_message(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        observe.logger("supervisor").info("ready", workers=2)
    assert caplog.messages == ["ready workers=2"]

"""The ready file and the service manager's datagram.

Property: the file is there, whole, exactly while the pool is ready; the manager hears READY=1 once and STOPPING=1 once.
Tolerance: none. Reason: what waits for the file starts clients at once.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from geist_pool.errors import ConfigError
from geist_pool.readiness import Readiness


def test_file_is_there_while_ready(tmp_path: Path) -> None:
    file = tmp_path / "ready"
    file.write_text("of a pool that was killed")
    readiness = Readiness(file, None)
    readiness.prepare()
    assert not file.exists()
    readiness.announce(pid=7, address="ipc:///x")
    assert json.loads(file.read_text()) == {"pid": 7, "address": "ipc:///x"}
    assert list(tmp_path.iterdir()) == [file]
    readiness.withdraw()
    assert list(tmp_path.iterdir()) == []
    file.write_text("of the next pool")
    readiness.withdraw()
    assert file.exists()


def test_file_that_cannot_be_is_told_before_the_start(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "none" / "ready"):
        with pytest.raises(ConfigError) as caught:
            Readiness(file, None).prepare()
        assert caught.value.path == "ready_file"


@pytest.mark.parametrize("abstract", [False, True])
def test_service_manager_hears(tmp_path: Path, abstract: bool) -> None:
    name = f"geist-pool-test-{os.getpid()}" if abstract else str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}" if abstract else name)
        manager.settimeout(10)
        readiness = Readiness(None, f"@{name}" if abstract else name)
        readiness.withdraw()
        readiness.announce(pid=1)
        readiness.withdraw()
        readiness.withdraw()
        assert [manager.recv(100), manager.recv(100)] == [b"READY=1", b"STOPPING=1"]
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def test_manager_that_is_gone_is_no_error(tmp_path: Path) -> None:
    Readiness(None, str(tmp_path / "none")).announce(pid=1)

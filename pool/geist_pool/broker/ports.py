"""What the loop needs besides its sockets: text work, shared memory, and a way to be woken."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Protocol

from geist_pool.broker.events import Adopted, AdoptedContext, AdoptStore
from geist_pool.broker.text_types import TextDone, TextJob
from geist_pool.engine import Image
from geist_pool.store import shm


class TextPort(Protocol):
    """Text work elsewhere; TextJobs is one."""

    def fileno(self) -> int: ...
    def submit(self, job: TextJob) -> None: ...
    def poll(self) -> list[TextDone]: ...


class StorePort(Protocol):
    """Shared memory."""

    def adopt(self, order: AdoptStore) -> Adopted:
        """What is there of an earlier life; may take seconds, runs in a thread of its own."""

    def unlink(self, name: str) -> None: ...
    def unlink_all(self) -> None: ...


class Store:
    """The real one."""

    def __init__(self, pool: str, kv_type: str) -> None:
        self._pool = pool
        self._kv_type = kv_type

    def adopt(self, order: AdoptStore) -> Adopted:
        def check(image: memoryview, kv: Sequence[memoryview], first_block: int) -> Sequence[int]:
            ids = Image.check(image, kv, first_block, fingerprint=order.fingerprint, kv_type=self._kv_type)
            return [int(i) for i in ids]

        found = shm.scan(self._pool, fingerprint=order.fingerprint, numerics=order.numerics, geometry=order.geometry, check=check)
        return Adopted(
            contexts=tuple(AdoptedContext(s.envelope, s.ref, s.tokens) for s in found.sound),
            unlink=tuple(found.unlink),
        )

    def unlink(self, name: str) -> None:
        shm.unlink(name)

    def unlink_all(self) -> None:
        for found in shm.list_objects(self._pool):
            shm.unlink(found.name)


class Wake:
    """Makes the poller return, from any thread or signal handler; after `close` it does nothing."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.RLock()  # a signal handler may interrupt the thread that holds it
        self._closed = False

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._fd)

"""What the loop needs besides its sockets: text work, shared memory, and a way to be woken."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from geist_pool import observe
from geist_pool.broker.events import (
    Adopted,
    AdoptedContext,
    AdoptStore,
    Bindings,
    KeepBindings,
    ListSaved,
    Peeked,
    PeekSaved,
    SavedFile,
    SavedHead,
    SavedListed,
)
from geist_pool.broker.saved import SUFFIX
from geist_pool.broker.text_types import TextDone, TextJob
from geist_pool.engine import Image
from geist_pool.errors import EngineError, GeistPoolError, Internal
from geist_pool.store import files, shm

_decode_bindings: Final = msgspec.msgpack.Decoder(Bindings).decode


class TextPort(Protocol):
    """Text work elsewhere; TextJobs is one."""

    def fileno(self) -> int: ...
    def at_once(self, job: TextJob) -> TextDone | None:
        """The result of a job so small that the way to a thread and back would cost more; None for any other."""

    def submit(self, job: TextJob) -> None: ...
    def poll(self) -> list[TextDone]: ...


class StorePort(Protocol):
    """Shared memory, and files of saved contexts."""

    def adopt(self, order: AdoptStore) -> Adopted:
        """What is there of an earlier life; may take seconds, runs in a thread of its own."""

    def unlink(self, name: str) -> None: ...
    def unlink_all(self) -> None: ...
    def keep_bindings(self, order: KeepBindings) -> None:
        """Runs in a thread of its own. Raises OSError; what was kept before is as it was then."""

    def peek(self, order: PeekSaved) -> Peeked:
        """Runs in a thread of its own, as `list_saved`; neither raises."""

    def list_saved(self, order: ListSaved) -> SavedListed: ...


class Store:
    """The real one."""

    def __init__(self, pool: str, kv_type: str, bindings: str = "") -> None:
        """pool: its key. bindings: path of the file that keeps them; "": nothing is kept."""
        self._pool = pool
        self._kv_type = kv_type
        self._bindings = Path(bindings) if bindings else None

    def adopt(self, order: AdoptStore) -> Adopted:
        def check(image: memoryview, kv: Sequence[memoryview], first_block: int) -> Sequence[int]:
            ids = Image.check(image, kv, first_block, fingerprint=order.fingerprint, kv_type=self._kv_type)
            return [int(i) for i in ids]

        found = shm.scan(self._pool, fingerprint=order.fingerprint, numerics=order.numerics, geometry=order.geometry, check=check)
        return Adopted(
            contexts=tuple(AdoptedContext(s.envelope, s.ref, s.tokens) for s in found.sound),
            unlink=tuple(found.unlink),
            bindings=self.read_bindings(),
        )

    def read_bindings(self) -> Bindings | None:
        try:
            return None if self._bindings is None else _decode_bindings(self._bindings.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            observe.logger("broker").error("names of contexts cannot be read; those they were made under hold", error=str(error))
            return None

    def keep_bindings(self, order: KeepBindings) -> None:
        if self._bindings is None:
            return
        temporary = self._bindings.with_name(f".{self._bindings.name}.tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.msgpack.encode(order.bindings))
        temporary.replace(self._bindings)

    def unlink(self, name: str) -> None:
        shm.unlink(name)

    def unlink_all(self) -> None:
        for found in shm.list_objects(self._pool):
            shm.unlink(found.name)

    def peek(self, order: PeekSaved) -> Peeked:
        return Peeked(order.job, _or_error(lambda: _head(Path(order.path))))

    def list_saved(self, order: ListSaved) -> SavedListed:
        return SavedListed(order.job, _or_error(lambda: _heads(Path(order.directory))))


_T = TypeVar("_T")


def _or_error(look: Callable[[], _T]) -> _T | GeistPoolError:
    """What it gives, or the error that the client shall get: a thread must not swallow a request."""
    try:
        return look()
    except GeistPoolError as error:
        return error
    except OSError as error:
        return EngineError(f"saved contexts cannot be read: {error.strerror}")
    except Exception as error:
        return Internal(f"saved contexts could not be looked at: {type(error).__name__}: {error}")


def _heads(directory: Path) -> tuple[SavedFile, ...]:
    heads: list[SavedFile] = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.suffix == SUFFIX and not path.name.startswith("."):
            with suppress(GeistPoolError, FileNotFoundError):  # no saved context, or gone since
                heads.append(SavedFile(path.name.removesuffix(SUFFIX), _head(path)))
    return tuple(heads)


def _head(path: Path) -> SavedHead:
    head = files.peek(path)
    return SavedHead(head.envelope, head.n_tokens, head.fingerprint, head.file_bytes, path.stat().st_mtime)


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

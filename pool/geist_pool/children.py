"""One child process of the supervisor: started as a new interpreter, waited for by a thread of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence


class Child:
    """A running child. `on_end` is called once, from another thread, when it has ended.

    command: its argument vector. pass_fds: descriptors that it inherits. cpus: the cores it may use; () for all.
    It leads a session of its own, so that a terminal's Ctrl-C does not reach it: ending has an order, and that is the
    supervisor's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        on_end: Callable[[Child], None],
        *,
        pass_fds: Sequence[int] = (),
        cpus: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.started = time.monotonic()
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=pass_fds, start_new_session=True)
        if cpus:
            with contextlib.suppress(ProcessLookupError):  # it ended already: `on_end` will tell
                os.sched_setaffinity(self.pid, cpus)  # before it starts threads, which inherit it
        self._done = threading.Event()
        threading.Thread(target=self._wait, args=(on_end,), name=f"wait-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._done.is_set()

    @property
    def age(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.started

    @property
    def exit_words(self) -> str:
        """How it ended, e.g. "exit code 1" or "signal SIGKILL"; "running" before."""
        code = self._process.returncode
        if code is None:
            return "running"
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"

    def _wait(self, on_end: Callable[[Child], None]) -> None:
        self._process.wait()
        self._done.set()
        on_end(self)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal if it is still there."""
        if not self.ended:
            self._process.send_signal(number)

    def join(self, timeout: float) -> bool:
        """Waits until it has ended; False if it has not within `timeout` seconds."""
        return self._done.wait(max(0.0, timeout))


def stop_all(children: Sequence[Child], number: signal.Signals, until: float) -> None:
    """Sends each a signal and waits for them until the moment `until` of the monotonic clock."""
    for child in children:
        child.send(number)
    for child in children:
        child.join(until - time.monotonic())


def kill_all(children: Sequence[Child]) -> None:
    """Ends each at once and waits until the kernel has done it."""
    stop_all([c for c in children if not c.ended], signal.SIGKILL, time.monotonic() + 10)

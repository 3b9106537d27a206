"""A child's tie to the supervisor: the read end of a pipe whose write end only the supervisor holds.

When the supervisor ends, in whatever way, the kernel closes the write end and every child reads the end of file. No process is
then left behind, not even after SIGKILL of the supervisor.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def hold(parent_fd: int, on_end: Callable[[], None] | None = None) -> None:
    """Watches `parent_fd` in a daemon thread; at its end of file runs `on_end`, by default the end of this process.

    The default does not wait for the main thread, which may be in a pass of many seconds: nothing that must be tidied lives in
    the process, since unsealed objects in shared memory are removed at the next start. -1 watches nothing.
    """
    if parent_fd < 0:
        return

    def watch() -> None:
        while True:
            try:
                data = os.read(parent_fd, 64)
            except InterruptedError:
                continue
            except OSError:
                data = b""
            if not data:
                break
        if on_end is None:
            os._exit(0)
        on_end()

    threading.Thread(target=watch, name="lifeline", daemon=True).start()

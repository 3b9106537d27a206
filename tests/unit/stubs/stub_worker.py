"""A worker that says its name once and waits. Faults: "crash", "silent" (no hello), "deaf" (ignores SIGTERM).

"crash-if=PATH" crashes where there is such a file: a test can decide when.
"""

import signal
import sys
from pathlib import Path

import zmq

from geist_pool import lifeline
from geist_pool.config import worker_config

config = worker_config(sys.argv[1])
if "crash" in config.faults:
    sys.exit(3)
if any(word.startswith("crash-if=") and Path(word.removeprefix("crash-if=")).exists() for word in config.faults):
    sys.exit(3)
lifeline.hold(config.parent_fd)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in config.faults else signal.SIG_DFL)
if "silent" not in config.faults:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(config.worker_address)
    socket.send(config.worker.encode())
while True:
    signal.pause()

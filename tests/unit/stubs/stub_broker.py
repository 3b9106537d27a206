"""A broker that only answers `stats`, counting the workers that have said hello. Faults: "crash", "deaf" (ignores SIGTERM)."""

import signal
import sys

import msgspec
import zmq

from geist_pool import lifeline, protocol
from geist_pool.config import broker_config

config = broker_config(sys.argv[1])
if "crash" in config.faults:
    sys.exit(3)
lifeline.hold(config.parent_fd)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in config.faults else signal.SIG_DFL)
context = zmq.Context()
clients, workers = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
clients.bind(config.address)
workers.bind(config.worker_address)
seen: set[bytes] = set()
poller = zmq.Poller()
poller.register(clients, zmq.POLLIN)
poller.register(workers, zmq.POLLIN)
fields = dict.fromkeys(protocol.StatsResult.__struct_fields__, 0) | {"requests": {}, "errors": {}, "uptime_s": 0.0}
while True:
    ready = dict(poller.poll())
    if workers in ready:
        seen.add(workers.recv_multipart()[1])
    if clients in ready:
        peer, magic, rid, _ = clients.recv_multipart()
        stats = protocol.StatsResult(**{**fields, "workers": len(seen), "store_limit": config.memory})
        clients.send_multipart((peer, magic, rid, msgspec.msgpack.encode(protocol.Reply(ok=True, result=stats))))

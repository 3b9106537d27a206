"""A broker that only answers `info` and `stats`, counting the workers that have said hello.

Faults: "crash", "deaf" (ignores SIGTERM), "silent" (binds nothing).
"""

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
if "silent" in config.faults:
    while True:
        signal.pause()
context = zmq.Context()
clients, workers = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
clients.bind(config.address)
workers.bind(config.worker_address)
seen: set[bytes] = set()
poller = zmq.Poller()
poller.register(clients, zmq.POLLIN)
poller.register(workers, zmq.POLLIN)
required = [f.name for f in msgspec.structs.fields(protocol.StatsResult) if f.required]
fields = dict.fromkeys(required, 0) | {"requests": {}, "errors": {}, "uptime_s": 0.0}
while True:
    ready = dict(poller.poll())
    if workers in ready:
        seen.add(workers.recv_multipart()[1])
    if clients in ready:
        peer, magic, rid, body = clients.recv_multipart()
        if msgspec.msgpack.decode(body)["op"] == "info":
            sizes = {"n_vocab": 1, "n_ctx": 1, "workers": len(seen), "slots": 1, "protocol": protocol.PROTOCOL_VERSION}
            words = dict.fromkeys(("version", "model", "architecture", "fingerprint", "kv_type"), "stub")
            result = protocol.InfoResult(pool=config.pool, has_template=False, **sizes, **words)
        else:
            result = protocol.StatsResult(**{**fields, "workers": len(seen), "store_limit": config.memory})
        clients.send_multipart((peer, magic, rid, msgspec.msgpack.encode(protocol.Reply(ok=True, result=result))))

"""The wire without the client library: a REQ socket and JSON. Any language with ZeroMQ can do the same.

    geist-pool                            # in one terminal
    python examples/raw_zmq.py [ADDRESS]  # in another

A REQ socket takes one reply a request, so everything works here but "stream".
"""

import json
import os
import sys

import zmq


def default_address() -> str:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return f"ipc://{runtime}/geist-pool/default.ipc" if runtime else f"ipc:///tmp/geist-pool-{os.getuid()}/default.ipc"


def ask(socket: zmq.Socket[bytes], number: int, **request: object) -> dict[str, object]:
    socket.send_multipart([b"GP1", str(number).encode(), json.dumps(request).encode()])
    _magic, _id, body = socket.recv_multipart()
    reply = json.loads(body)
    if not reply["ok"]:
        raise SystemExit(f"{reply['error']['code']}: {reply['error']['message']}")
    return reply["result"]


with zmq.Context() as context, context.socket(zmq.REQ) as req:
    req.linger, req.rcvtimeo = 0, 60_000
    req.connect(sys.argv[1] if len(sys.argv) > 1 else default_address())
    print(ask(req, 1, op="info")["model"])
    ask(req, 2, op="context.create", name="road", text="The road to Amble is long, and it rains.")
    print(ask(req, 3, op="generate", context="road", text=" The rider said:", max_tokens=24)["text"])
    print(ask(req, 4, op="score", context="road", text=" The rider is", labels=[" tired", " glad"])["best"])

"""The process that renders chat templates: `python -m geist_pool.broker.template_process`.

It speaks frames over stdin and stdout, one reply to each request: 4 bytes of length (little endian), then
MessagePack. The first frame, an empty one, says that it is ready. At the end of stdin it exits; a template that
does not end is ended by the broker, or, should the broker be gone, by an alarm that no template can catch.
"""

from __future__ import annotations

import resource
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from geist_pool.broker.text_types import TemplateArgs
from geist_pool.protocol import Message

LENGTH = struct.Struct("<I")
MEMORY_BYTES = 512 << 20
"""Address space of the process; a template that wants more fails with a clear error."""


class RenderRequest(msgspec.Struct, frozen=True, array_like=True):
    """One rendering; the fields are those of `text.template.render`. deadline_s: when the alarm ends us."""

    template: str
    messages: tuple[Message, ...]
    bos_text: str
    eos_text: str
    add_generation_prompt: bool
    args: TemplateArgs
    chars_max: int
    deadline_s: float


class RenderReply(msgspec.Struct, frozen=True, array_like=True):
    """The text, or the words and the path of a TemplateError."""

    text: str | None = None
    error: str | None = None
    path: str | None = None


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame, or None at the end of the stream (also in the middle of a frame)."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (n,) = LENGTH.unpack(head)
    body = stream.read(n)
    return body if len(body) == n else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """One frame, flushed."""
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def main() -> None:
    """Answers requests until stdin ends."""
    # Imported here: the broker imports this module for its frames and has no use for jinja2.
    from geist_pool.errors import TemplateError
    from geist_pool.text.template import render

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the broker decides when to stop
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decoder = msgspec.msgpack.Decoder(RenderRequest)
    write_frame(sys.stdout.buffer, b"")
    while (body := read_frame(sys.stdin.buffer)) is not None:
        request = decoder.decode(body)
        signal.setitimer(signal.ITIMER_REAL, request.deadline_s)
        try:
            text = render(
                request.template,
                [{"role": m.role, "content": m.content} for m in request.messages],
                bos_text=request.bos_text,
                eos_text=request.eos_text,
                add_generation_prompt=request.add_generation_prompt,
                args=request.args,
                chars_max=request.chars_max,
            )
            reply = msgspec.msgpack.encode(RenderReply(text=text))
        except TemplateError as error:
            reply = msgspec.msgpack.encode(RenderReply(error=error.message, path=error.path))
        except UnicodeEncodeError:
            reply = msgspec.msgpack.encode(RenderReply(error="the template writes lone surrogates"))
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(sys.stdout.buffer, reply)


if __name__ == "__main__":
    main()

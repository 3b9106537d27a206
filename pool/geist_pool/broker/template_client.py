"""The broker's side of the template process: started when needed, killed when it overstays."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from types import TracebackType

import msgspec

from geist_pool.broker.template_process import LENGTH, RenderReply, RenderRequest
from geist_pool.broker.text_types import TemplateArgs
from geist_pool.errors import TemplateError
from geist_pool.protocol import Message

START_S = 20.0
"""How long a new interpreter may take until it is ready, on a busy machine."""

_ALARM_SLACK_S = 1.0  # the child's own alarm comes after our kill, which says why
_CHUNK = 1 << 16


class TemplateProcess:
    """Renders chat templates in a child process, one at a time; any thread may call.

    The child is a new interpreter (never a fork), starts with the first call or `start`, and is replaced after
    a deadline or a crash. Close it, or use it as a context manager.
    """

    def __init__(self, *, deadline_s: float = 2.0, chars_max: int = 1 << 20) -> None:
        """deadline_s: wall time of one rendering; chars_max: characters of one rendering."""
        self._deadline_s = deadline_s
        self._chars_max = chars_max
        # A character is at most 4 bytes; the rest is the frame's own fields and the words of an error.
        self._reply_bytes_max = 4 * chars_max + (64 << 10)
        self._turn = threading.Lock()  # one exchange at a time
        self._state = threading.Lock()  # guards _child and _closed; never held while waiting for the child
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._decoder = msgspec.msgpack.Decoder(RenderReply)

    def __enter__(self) -> TemplateProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        with self._state:
            return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the child now, so that the first rendering need not wait for it.

        Raises TemplateError if it is not ready in time.
        """
        with self._turn:
            self._running()

    def render(
        self,
        template: str,
        messages: tuple[Message, ...],
        *,
        bos_text: str,
        eos_text: str,
        add_generation_prompt: bool,
        args: TemplateArgs,
    ) -> str:
        """The text of the conversation; see `text.template.render`.

        Raises TemplateError, also for a template that runs or writes too long and for a closed process.
        """
        request = RenderRequest(
            template=template,
            messages=messages,
            bos_text=bos_text,
            eos_text=eos_text,
            add_generation_prompt=add_generation_prompt,
            args=args,
            chars_max=self._chars_max,
            deadline_s=self._deadline_s + _ALARM_SLACK_S,
        )
        body = msgspec.msgpack.encode(request)
        with self._turn:
            child = self._running()
            try:
                frame = self._exchange(child, LENGTH.pack(len(body)) + body, self._deadline_s)
            except _Overdue:
                self._kill(child)
                raise TemplateError(f"the template runs longer than {self._deadline_s:g} s") from None
            except _Gone as gone:
                self._kill(child)
                raise TemplateError(f"the template process failed: {gone}") from None
        reply = self._decoder.decode(frame)
        if reply.text is None:
            raise TemplateError(reply.error or "the template failed", path=reply.path)
        return reply.text

    def close(self) -> None:
        """End the child at once, also in the middle of a rendering (which then fails)."""
        with self._state:
            self._closed = True
            child = self._child
        if child is not None:
            child.kill()
        with self._turn:  # whoever was waiting for the child has seen its end now
            if self._child is not None:
                self._kill(self._child)

    def _running(self) -> subprocess.Popen[bytes]:
        """The child, started if there is none. Called with the turn held."""
        if self._child is not None and self._child.poll() is not None:
            self._kill(self._child)
        with self._state:
            if self._closed:
                raise TemplateError("the pool is stopping")
            if self._child is not None:
                return self._child
            child = subprocess.Popen(
                # -P: the working directory is no place to import from
                [sys.executable, "-P", "-m", "geist_pool.broker.template_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
            self._child = child
        assert child.stdin is not None and child.stdout is not None
        os.set_blocking(child.stdin.fileno(), False)
        os.set_blocking(child.stdout.fileno(), False)
        try:
            self._exchange(child, b"", START_S)
        except (_Overdue, _Gone) as error:
            self._kill(child)
            raise TemplateError(f"the template process does not start: {error}") from None
        return child

    def _exchange(self, child: subprocess.Popen[bytes], out: bytes, seconds: float) -> bytes:
        """Send `out` and wait for one frame.

        Raises _Overdue when `seconds` have passed, _Gone when the child ended or sends what no reply can be.
        """
        assert child.stdin is not None and child.stdout is not None
        to, back = child.stdin.fileno(), child.stdout.fileno()
        end = time.monotonic() + seconds
        poller = select.poll()
        poller.register(back, select.POLLIN)
        unsent = memoryview(out)
        if unsent:
            poller.register(to, select.POLLOUT)
        got = bytearray()
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise _Overdue(f"no answer within {seconds:g} s")
            ready = dict(poller.poll(left * 1000))
            if to in ready:
                try:
                    unsent = unsent[os.write(to, unsent[:_CHUNK]) :]
                except BrokenPipeError:
                    raise _Gone("it ended") from None
                if not unsent:
                    poller.unregister(to)
            if back in ready:
                chunk = os.read(back, _CHUNK)
                if not chunk:
                    raise _Gone("it ended")
                got += chunk
                if len(got) < LENGTH.size:
                    continue
                (n,) = LENGTH.unpack_from(got)
                if n > self._reply_bytes_max:
                    raise _Gone(f"its reply of {n} bytes is larger than {self._reply_bytes_max}")
                if len(got) >= LENGTH.size + n:
                    return bytes(got[LENGTH.size : LENGTH.size + n])

    def _kill(self, child: subprocess.Popen[bytes]) -> None:
        """End this child for good and forget it. Called with the turn held."""
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        with self._state:
            if self._child is child:
                self._child = None


class _Overdue(Exception):
    """The child did not answer in time."""


class _Gone(Exception):
    """The child ended, or what it sends makes no sense."""

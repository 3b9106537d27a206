"""Text work outside the broker's loop: tokenising in threads, rendering in a killable process.

The loop hands a job to `TextJobs.submit`, polls `TextJobs.fileno()` for readability beside its sockets, and
collects finished jobs with `TextJobs.poll`. Every job comes back exactly once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final

import msgspec

from geist_pool.broker.template_client import TemplateProcess
from geist_pool.broker.text_types import LEFT_IDS_MAX, Join, Prompt, TemplateArgs, TextDone, TextJob
from geist_pool.errors import BadRequest, GeistPoolError, Internal, Stopping, TooLong, Unsupported
from geist_pool.protocol import LIMITS, Message
from geist_pool.text.suffix import suffix_of
from geist_pool.text.tokenizer import Tokenizer

AT_ONCE_CHARS: Final = 2048
"""Text, labels and ids of a job that is done in the loop itself: half a millisecond at most. A thread costs a tenth of that and,
what is more, takes the interpreter's lock from the loop again and again."""

Render = Callable[[tuple[Message, ...], bool, TemplateArgs], str]
"""(messages, add_generation_prompt, template_args) -> text of the conversation."""


class TextJobs:
    """Threads for the tokenizer and the template process of one model. `submit` and `poll` are the loop's."""

    def __init__(self, tokenizer: Tokenizer, *, threads: int = 2, deadline_s: float = 2.0, chars_max: int = 1 << 20) -> None:
        """deadline_s, chars_max: limits of one rendering."""
        self._tokenizer = tokenizer
        self._templates = TemplateProcess(deadline_s=deadline_s, chars_max=chars_max)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._done: queue.SimpleQueue[TextDone] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._closed = False
        if tokenizer.vocabulary.chat_template is not None:
            self._threads.submit(self._warm)

    def __enter__(self) -> TextJobs:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def fileno(self) -> int:
        """Readable while finished jobs wait for `poll`."""
        return self._wake

    def at_once(self, job: TextJob) -> TextDone | None:
        """The result of a small job without a template; None for any other, which is to be submitted."""
        return self._result(job) if is_small(job) else None

    def submit(self, job: TextJob) -> None:
        """Queue a job. Raises RuntimeError after `close`."""
        self._threads.submit(self._run, job)

    def poll(self) -> list[TextDone]:
        """The jobs finished since the last call, without waiting; after `close` what was left over."""
        # The counter is cleared first: a job that finishes in between makes the descriptor readable again.
        if not self._closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        done: list[TextDone] = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except queue.Empty:
                return done

    def close(self) -> None:
        """End the threads and the template process; jobs not yet begun fail with Stopping. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._stopping.set()
        self._templates.close()
        self._threads.shutdown(wait=True)
        os.close(self._wake)

    def _warm(self) -> None:
        with contextlib.suppress(GeistPoolError):  # the first rendering tries again and reports it
            self._templates.start()

    def _run(self, job: TextJob) -> None:
        self._done.put(self._result(job))
        os.eventfd_write(self._wake, 1)

    def _result(self, job: TextJob) -> TextDone:
        begin = time.monotonic_ns()
        try:
            if self._stopping.is_set():
                raise Stopping("the pool is stopping")
            done = do_text_job(job, self._tokenizer, self._render)
        except GeistPoolError as error:
            done = TextDone(key=job.key, error=error)
        except Exception as error:  # a fault of ours must not lose the request
            internal = Internal(f"text job failed: {type(error).__name__}: {error}")
            internal.__cause__ = error
            done = TextDone(key=job.key, error=internal)
        elapsed_us = (time.monotonic_ns() - begin) // 1000
        return msgspec.structs.replace(done, elapsed_us=elapsed_us)

    def _render(self, messages: tuple[Message, ...], add_generation_prompt: bool, args: TemplateArgs) -> str:
        vocabulary = self._tokenizer.vocabulary
        if vocabulary.chat_template is None:
            raise Unsupported("this model's file has no chat template; send text instead of messages", path="messages")
        return self._templates.render(
            vocabulary.chat_template,
            messages,
            bos_text="" if vocabulary.bos is None else vocabulary.tokens[vocabulary.bos],
            eos_text="" if vocabulary.eos is None else vocabulary.tokens[vocabulary.eos],
            add_generation_prompt=add_generation_prompt,
            args=args,
        )


def is_small(job: TextJob) -> bool:
    """Whether the job takes a fraction of a millisecond, and nothing but the tokenizer."""
    prompt = job.prompt
    if job.answer is not None or (prompt is not None and prompt.messages is not None):
        return False
    size = sum(map(len, job.labels))
    if prompt is not None:
        size += len(prompt.text or "") + len(prompt.tokens or ())
    return size <= AT_ONCE_CHARS


def do_text_job(job: TextJob, tokenizer: Tokenizer, render: Render) -> TextDone:
    """The result of a job; `render` renders a conversation. Raises what the job's error shall be."""
    if job.answer is not None:
        return TextDone(key=job.key, tokens=_answer_ids(job.answer, job.answer_data, tokenizer))
    tokens: list[int] = []
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    args: TemplateArgs = {}
    special = job.special
    if job.prompt is not None:
        _check_one_field(job.prompt)
        if job.prompt.messages is not None:
            messages = (*(job.context_messages or ()), *job.prompt.messages)
            args = {**job.context_template_args, **job.template_args}
            tokens, text = _conversation(job, job.prompt.messages, messages, args, tokenizer, render)
            special = True  # the template's own control tokens
        elif job.prompt.text is not None:
            text = job.prompt.text
            tokens = _encode(tokenizer, text, special=special, path="text")
            if job.add_bos:
                tokens = tokenizer.bos() + tokens
        elif job.prompt.tokens is not None:
            _check_ids(job.prompt.tokens, tokenizer, "tokens")
            tokens = list(job.prompt.tokens)
    left = job.context_tokens[-LEFT_IDS_MAX:]
    join = tokenizer.join(left, text, tokens, special=special) if left and text else None
    label_tokens, label_joins = _labels(job, (*left, *tokens)[-LEFT_IDS_MAX:], tokenizer)
    return TextDone(
        key=job.key,
        tokens=tuple(tokens),
        label_tokens=label_tokens,
        join=join,
        label_joins=label_joins,
        messages=messages,
        template_args=args,
        text=text,
    )


def _answer_ids(answer: tuple[int, ...], data: bytes, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that spell exactly `data`, an answer's text up to its stop string: as many of the answer's own as lie inside it."""
    at = n = 0
    for token in answer:
        piece = b"" if tokenizer.is_control(token) else tokenizer.piece(token)
        if at == len(data) or not data.startswith(piece, at):
            break
        at += len(piece)
        n += 1
    try:
        rest = data[at:].decode()
    except UnicodeDecodeError as error:
        raise Unsupported(
            f"the answer ends inside a token and a character (byte {at + error.start}): no tokens have that text", path="publish"
        ) from None
    return (*answer[:n], *(_encode(tokenizer, rest, special=False, path="publish") if rest else ()))


def _check_one_field(prompt: Prompt) -> None:
    given = [name for name in ("text", "messages", "tokens") if getattr(prompt, name) is not None]
    if len(given) != 1:
        raise BadRequest(
            f"exactly one of text, messages and tokens is needed, got {' and '.join(given) or 'none'}",
            path=given[-1] if given else "text",
        )


def _conversation(
    job: TextJob,
    own: tuple[Message, ...],
    messages: tuple[Message, ...],
    args: TemplateArgs,
    tokenizer: Tokenizer,
    render: Render,
) -> tuple[list[int], str]:
    """Ids and text of the messages `own` at the end of the conversation `messages`.

    The conversation is rendered as a whole and must begin with what the context's ids stand for: that is what
    its state has seen. The template arguments and the clock it was made with need not be known for that.
    """
    if not own:
        raise BadRequest("an empty list of messages", path="messages")
    _check_words(own, job.template_args, tokenizer, special=job.special)
    if job.context_tokens and job.context_messages is None:
        raise BadRequest("the context was not made from messages; continue it with text or tokens", path="messages")
    rendered = render(messages, job.add_generation_prompt, args)
    vocabulary = tokenizer.vocabulary
    bos = tokenizer.bos()
    bos_text = vocabulary.tokens[bos[0]] if bos else ""
    writes_bos = bool(bos) and rendered.startswith(bos_text)
    if not job.context_tokens:
        # A template that writes BOS itself must not get a second one.
        front = bos if job.add_bos and not writes_bos else []
        return front + _encode(tokenizer, rendered, special=True, path="messages"), rendered
    have = list(job.context_tokens)
    if bos and have[:1] == bos and not writes_bos:
        have = have[1:]
    rendered = tokenizer.normalize(rendered)
    context_text = tokenizer.decode_bytes(have, special=True).decode("utf-8", "replace")
    text = suffix_of(context_text, rendered, path="messages")
    return _encode(tokenizer, text, special=True, path="messages"), text


def _check_words(messages: tuple[Message, ...], args: TemplateArgs, tokenizer: Tokenizer, *, special: bool) -> None:
    """What clients put into a template must be text, and what one speaker says must not begin another's turn."""
    places = [(f"messages[{i}].{name}", getattr(m, name)) for i, m in enumerate(messages) for name in ("role", "content")]
    places += [(f"template_args.{name}", value) for name, value in args.items() if isinstance(value, str)]
    for path, value in places:
        tokenizer.check(value, path)
    if special:
        return
    # Two texts that a template writes side by side may be such a name together.
    places.append(("messages", "".join(m.role.strip() + m.content.strip() for m in messages)))
    for path, value in places:
        found = tokenizer.has_control_text(value)
        if found is not None:
            position, name = found
            raise BadRequest(
                f"text of the control token {name} at position {position}; it is taken only with special: true",
                path=path,
                position=position,
            )


def _encode(tokenizer: Tokenizer, text: str, *, special: bool, path: str) -> list[int]:
    try:
        return tokenizer.encode(text, special=special)
    except BadRequest as error:
        error.path = path
        raise


def _check_ids(ids: tuple[int, ...], tokenizer: Tokenizer, path: str) -> None:
    n_tokens = len(tokenizer.vocabulary.tokens)
    for i, token in enumerate(ids):
        if not 0 <= token < n_tokens:
            raise BadRequest(f"token id {token} is outside the vocabulary of {n_tokens} tokens", path=f"{path}[{i}]")


def _labels(
    job: TextJob, left: tuple[int, ...], tokenizer: Tokenizer
) -> tuple[tuple[tuple[int, ...], ...], tuple[Join | None, ...]]:
    """Ids of each label, and how each joins what stands before it."""
    all_ids: list[tuple[int, ...]] = []
    joins: list[Join | None] = []
    for i, label in enumerate(job.labels):
        path = f"labels[{i}]"
        if isinstance(label, str):
            try:
                ids = tokenizer.label_ids(label, special=job.special)
            except BadRequest as error:
                error.path = path
                raise
            joins.append(tokenizer.join(left, label, ids, special=job.special) if left else None)
        else:
            ids = label
            joins.append(None)
            _check_ids(ids, tokenizer, path)
        if not ids:
            raise BadRequest("an empty label has no probability", path=path)
        if len(ids) > LIMITS.label_tokens:
            raise TooLong(
                f"a label of {len(ids)} tokens; at most {LIMITS.label_tokens} are taken",
                path=path,
                tokens=len(ids),
                limit=LIMITS.label_tokens,
            )
        all_ids.append(ids)
    return tuple(all_ids), tuple(joins)

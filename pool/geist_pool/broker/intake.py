"""What is checked before a worker sees a request, and what becomes of its text. Pure.

The wire's decoder has checked types and ranges; here are the rules that types cannot say. Everything raises the error that the
client shall get.
"""

from __future__ import annotations

from geist_pool.broker.entries import Entry
from geist_pool.broker.text_types import Prompt, TextDone, TextJob
from geist_pool.errors import BadRequest, TooLong
from geist_pool.protocol import (
    LIMITS,
    Cancel,
    ContextCreate,
    ContextDrop,
    ContextGet,
    Generate,
    Request,
    Score,
    Tokenize,
)

Prompted = ContextCreate | Generate | Score


def check_request(request: Request, *, can_stream: bool) -> None:
    """Raises BadRequest that names the field."""
    _check_word(request.space, "space", LIMITS.space_bytes)
    if isinstance(request, ContextGet | ContextDrop):
        _check_word(request.context, "context", LIMITS.name_bytes)
    elif isinstance(request, Cancel):
        _check_word(request.id, "id", 2 * LIMITS.request_id_bytes + len("hex:"))
    elif isinstance(request, Tokenize):
        _check_text(request.text, "text")
    elif isinstance(request, ContextCreate):
        if request.name is not None:
            _check_word(request.name, "name", LIMITS.name_bytes)
        if request.on is not None:
            _check_word(request.on, "on", LIMITS.name_bytes)
        _check_prompt(request, optional=request.on is not None)
    elif isinstance(request, Generate | Score):
        if request.context is not None:
            _check_word(request.context, "context", LIMITS.name_bytes)
        _check_prompt(request, optional=request.context is not None)
        if isinstance(request, Generate):
            _check_generate(request, can_stream=can_stream)
        else:
            _check_labels(request)


def base_reference(request: Prompted) -> tuple[str | None, str]:
    """The context that a request names, and the field that names it."""
    return (request.on, "on") if isinstance(request, ContextCreate) else (request.context, "context")


def has_prompt(request: Prompted) -> bool:
    return request.text is not None or request.messages is not None or request.tokens is not None


def text_job(key: str, request: Tokenize | Prompted, base: Entry | None, context_tokens: tuple[int, ...]) -> TextJob | None:
    """The text work of a request; None where there is none: a context alone."""
    if isinstance(request, Tokenize):
        return TextJob(key=key, prompt=Prompt(text=request.text), special=request.special)
    labels = request.labels if isinstance(request, Score) else ()
    if not has_prompt(request) and not labels:
        return None
    prompt = Prompt(text=request.text, messages=request.messages, tokens=request.tokens) if has_prompt(request) else None
    return TextJob(
        key=key,
        prompt=prompt,
        context_tokens=context_tokens,
        context_messages=None if base is None else base.messages,
        context_template_args={} if base is None else base.template_args,
        add_bos=base is None,
        special=request.special,
        add_generation_prompt=not isinstance(request, ContextCreate),
        template_args=request.template_args,
        labels=labels,
    )


def no_text(key: str, base: Entry) -> TextDone:
    """The result of no text work behind a context: it stays what it is."""
    return TextDone(key=key, messages=base.messages, template_args=base.template_args)


def check_length(request: Prompted, n_prompt: int, done: TextDone, n_ctx: int) -> None:
    """`n_prompt` counts context and suffix. Nothing is ever cut: TooLong with both numbers, BadRequest for nothing at all."""
    if n_prompt == 0:
        raise BadRequest("the prompt is empty: there is nothing to continue", path=_prompt_field(request))
    if isinstance(request, ContextCreate):
        if n_prompt > n_ctx:
            raise TooLong(
                f"{n_prompt} tokens do not fit into {n_ctx} positions", path=_prompt_field(request), tokens=n_prompt, limit=n_ctx
            )
        return
    if n_prompt + 1 > n_ctx:
        raise TooLong(
            f"context and prompt are {n_prompt} tokens; {n_ctx} positions leave no room for an answer",
            path=_prompt_field(request),
            tokens=n_prompt + 1,
            limit=n_ctx,
        )
    if isinstance(request, Generate):
        if n_prompt + request.max_tokens > n_ctx:
            raise TooLong(
                f"{n_prompt} tokens and max_tokens {request.max_tokens} are {n_prompt + request.max_tokens}; "
                f"there are {n_ctx} positions",
                path="max_tokens",
                tokens=n_prompt + request.max_tokens,
                limit=n_ctx,
            )
        return
    for i, label in enumerate(done.label_tokens):
        if n_prompt + len(label) > n_ctx:
            raise TooLong(
                f"{n_prompt} tokens and a label of {len(label)} do not fit into {n_ctx} positions",
                path=f"labels[{i}]",
                tokens=n_prompt + len(label),
                limit=n_ctx,
            )


def _prompt_field(request: Prompted) -> str:
    for name in ("text", "messages", "tokens"):
        if getattr(request, name) is not None:
            return name
    return base_reference(request)[1]


def _check_word(value: str, path: str, limit: int) -> None:
    """Names, ids and stop strings: characters that can be written down, no NUL, so many bytes at most."""
    if "\0" in value:
        raise BadRequest("a NUL is not allowed here", path=path)
    _check_text(value, path, limit)


def _check_text(value: str, path: str, limit: int = LIMITS.text_bytes) -> None:
    try:
        n = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        raise BadRequest(f"a lone surrogate at position {error.start}", path=path, position=error.start) from None
    if n > limit:
        raise BadRequest(f"{n} bytes are more than {limit}", path=path)


def _check_prompt(request: Prompted, *, optional: bool) -> None:
    given = [name for name in ("text", "messages", "tokens") if getattr(request, name) is not None]
    if len(given) > 1:
        raise BadRequest(f"only one of text, messages and tokens may be given, not {' and '.join(given)}", path=given[1])
    if not given and not optional:
        raise BadRequest("one of text, messages and tokens is needed", path="text")
    if request.text is not None:
        _check_text(request.text, "text")
    for i, message in enumerate(request.messages or ()):
        _check_text(message.role, f"messages[{i}].role")
        _check_text(message.content, f"messages[{i}].content")
    for name, value in request.template_args.items():
        _check_text(name, "template_args")
        if isinstance(value, str):
            _check_text(value, f"template_args.{name}")


def _check_generate(request: Generate, *, can_stream: bool) -> None:
    if request.stream and not can_stream:
        raise BadRequest("a REQ socket takes one reply only; a stream needs a DEALER", path="stream")
    for i, stop in enumerate(request.stop):
        _check_word(stop, f"stop[{i}]", LIMITS.stop_bytes)


def _check_labels(request: Score) -> None:
    for i, label in enumerate(request.labels):
        if not label:
            raise BadRequest("an empty label has no probability", path=f"labels[{i}]")
        if isinstance(label, str):
            _check_text(label, f"labels[{i}]")
        elif len(label) > LIMITS.label_tokens:
            raise BadRequest(f"{len(label)} tokens are more than {LIMITS.label_tokens}", path=f"labels[{i}]")

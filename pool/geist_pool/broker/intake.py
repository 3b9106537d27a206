"""What is checked before a worker sees a request, and what becomes of its text. Pure.

The wire's decoder has checked types and ranges; here are the rules that types cannot say. Everything raises the error that the
client shall get.
"""

from __future__ import annotations

import struct

from geist_pool.broker.content import ID_BYTES, unpack_ids
from geist_pool.broker.entries import Entry
from geist_pool.broker.events import SavedHead
from geist_pool.broker.text_types import LEFT_IDS_MAX, Prompt, TextDone, TextJob
from geist_pool.errors import BadRequest, ImageMismatch, TooLong
from geist_pool.protocol import (
    LIMITS,
    Cancel,
    ContextCreate,
    ContextDrop,
    ContextGet,
    ContextLoad,
    ContextSave,
    Generate,
    Request,
    Sampling,
    Score,
    Story,
    Tokenize,
)
from geist_pool.store.names import is_context_id

Prompted = ContextCreate | Generate | Score


def check_request(request: Request, *, can_stream: bool) -> None:
    """Raises BadRequest that names the field."""
    _check_word(request.space, "space", LIMITS.space_bytes)
    if isinstance(request, ContextGet | ContextDrop):
        _check_word(request.context, "context", LIMITS.name_bytes)
    elif isinstance(request, Cancel | Story):
        _check_word(request.id, "id", 2 * LIMITS.request_id_bytes + len("hex:"))
    elif isinstance(request, ContextSave):
        _check_word(request.context, "context", LIMITS.name_bytes)
        if request.saved is not None:
            _check_word(request.saved, "saved", LIMITS.name_bytes)
    elif isinstance(request, ContextLoad):
        _check_word(request.saved, "saved", LIMITS.name_bytes)
        _check_new_name(request.name, "name")
    elif isinstance(request, Tokenize):
        _check_text(request.text, "text")
    elif isinstance(request, ContextCreate):
        _check_new_name(request.name, "name")
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


def text_job(key: str, request: Tokenize | Prompted, base: Entry | None) -> TextJob | None:
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
        context_tokens=() if base is None else _left_ids(base, everything=request.messages is not None),
        context_messages=None if base is None else base.messages,
        context_template_args={} if base is None else base.template_args,
        add_bos=base is None,
        special=request.special,
        add_generation_prompt=not isinstance(request, ContextCreate),
        template_args=request.template_args,
        labels=labels,
    )


def _left_ids(base: Entry, *, everything: bool) -> tuple[int, ...]:
    """The context's ids; its last ones where text follows, which no more is compared with."""
    return unpack_ids(base.tokens if everything else base.tokens[-LEFT_IDS_MAX * ID_BYTES :])


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


def check_saved(request: ContextLoad, head: SavedHead, fingerprint: str, n_ctx: int) -> None:
    """Raises ImageMismatch for a file of another model, TooLong for more tokens than a session takes, BadRequest for a name in it
    that no context may have."""
    if request.name is None:
        _check_new_name(head.envelope.name, "saved")
    if head.fingerprint != fingerprint:
        raise ImageMismatch("the saved context was made from another model", path="saved", fingerprint=head.fingerprint)
    if head.n_tokens > n_ctx:
        raise TooLong(
            f"{head.n_tokens} tokens do not fit into {n_ctx} positions", path="saved", tokens=head.n_tokens, limit=n_ctx
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


def _check_new_name(value: str | None, path: str) -> None:
    """A name that a context is to get: it must not be taken for an id, which is looked for first."""
    if value is None:
        return
    _check_word(value, path, LIMITS.name_bytes)
    if is_context_id(value):
        raise BadRequest("12 hexadecimal digits are an id, not a name", path=path)


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
    _check_sampling(request.sampling)
    if request.sampling.stream + request.n > 1 << 31:
        raise BadRequest("the streams of the last samples are beyond 2^31", path="n")
    if request.publish is not None:
        if request.n > 1:
            raise BadRequest(f"{request.n} answers cannot be one context; publish needs n = 1", path="publish")
        _check_new_name(request.publish.name, "publish.name")


def _check_sampling(sampling: Sampling) -> None:
    """The engine takes float32: what is inside the limits must be so there too."""
    top_p, min_p, repeat_penalty = map(_single, (sampling.top_p, sampling.min_p, sampling.repeat_penalty))
    for name, value, sound in (
        ("top_p", top_p, top_p > 0),
        ("min_p", min_p, min_p < 1),
        ("repeat_penalty", repeat_penalty, repeat_penalty > 0),
    ):
        if not sound:
            given = getattr(sampling, name)
            raise BadRequest(f"{given!r} is {value!r} in single precision, which is out of range", path=f"sampling.{name}")


def _single(x: float) -> float:
    """The nearest number of single precision."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def _check_labels(request: Score) -> None:
    for i, label in enumerate(request.labels):
        if not label:
            raise BadRequest("an empty label has no probability", path=f"labels[{i}]")
        if isinstance(label, str):
            _check_text(label, f"labels[{i}]")
        elif len(label) > LIMITS.label_tokens:
            raise BadRequest(f"{len(label)} tokens are more than {LIMITS.label_tokens}", path=f"labels[{i}]")

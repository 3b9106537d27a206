"""Requests as values: what a method's arguments become on the wire, and what is handed out of the answer. Pure.

Options that are None are left out, so that the defaults stand in `protocol.py` alone; one that no request has is a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, TypedDict, TypeVar, cast

import msgspec

from geist_pool import protocol
from geist_pool.errors import BadRequest, ProtocolError, from_wire
from geist_pool.protocol import (
    Cancel,
    CancelResult,
    ContextCreate,
    ContextDrop,
    ContextDropResult,
    ContextGet,
    ContextInfo,
    ContextList,
    ContextListResult,
    ContextLoad,
    ContextResult,
    ContextSave,
    ContextSaved,
    Generate,
    GenerateResult,
    Info,
    InfoResult,
    Message,
    Publish,
    Reply,
    Request,
    Sampling,
    SavedInfo,
    SavedListResult,
    SavedResult,
    Score,
    ScoreResult,
    Stats,
    StatsResult,
    Story,
    StoryEvent,
    StoryResult,
    Tokenize,
    TokenizeResult,
)

Prompt = str | Sequence[int] | Sequence[Message | Mapping[str, str]]
"""Text, token ids, or chat messages (`Message`, or maps with role and content)."""

TemplateArgs = Mapping[str, bool | int | float | str | None]

T = TypeVar("T")
_Request = TypeVar("_Request")


class Options(TypedDict, total=False):
    """deadline_ms: from arrival at the broker; a request that takes longer ends, a generate with what it has."""

    deadline_ms: int | None


class TokenizeOptions(Options, total=False):
    """special: texts of control tokens become those tokens."""

    special: bool | None


class PromptOptions(TokenizeOptions, total=False):
    """template_args: passed to the chat template, e.g. {"enable_thinking": False}."""

    template_args: TemplateArgs | None


class KeepOptions(TypedDict, total=False):
    """name: binds the name, also if another context had it. ttl_s: seconds until it is dropped. pin: never evicted."""

    name: str | None
    ttl_s: int | None
    pin: bool | None


class CreateOptions(PromptOptions, KeepOptions, total=False):
    """on: id or name of a context that this one continues."""

    on: str | None


class SaveOptions(Options, total=False):
    """saved: the name in the pool's directory; by default the context's own."""

    saved: str | None


class LoadOptions(Options, KeepOptions, total=False):
    """As for a context that is created."""


class ScoreOptions(PromptOptions, total=False):
    """context: id or name of the context that is continued."""

    context: str | None


class GenerateOptions(ScoreOptions, total=False):
    """sampling: greedy by default. stop: strings that end the answer and are no part of it. logprobs: how many of the likeliest
    tokens to report beside each token's own. ignore_eog: go on past end-of-generation tokens. n: answers, sample i drawn from
    stream sampling.stream + i. publish: keep prompt and answer as a context."""

    max_tokens: int | None
    sampling: Sampling | None
    stop: Sequence[str] | None
    logprobs: int | None
    ignore_eog: bool | None
    n: int | None
    publish: Publish | None


class Call(Generic[T]):
    """A request, and how its final result becomes what the caller gets."""

    __slots__ = ("_expected", "_pick", "request")

    def __init__(self, request: Request, expected: type, pick: Callable[[Any], T]) -> None:
        self.request: Final = request
        self._expected = expected
        self._pick = pick

    def unpack(self, reply: Reply) -> T:
        """Raises the reply's error, or ProtocolError for a result of another kind."""
        return self._pick(result_of(reply, self._expected))


def result_of(reply: Reply, expected: type[T]) -> T:
    """The reply's result. Raises its error, or ProtocolError for a result of another kind."""
    if not reply.ok:
        if reply.error is None:
            raise ProtocolError("the pool answered with an error that says nothing")
        e = reply.error
        raise from_wire(e.code, e.message, e.path, e.retry_after, e.data)
    if not isinstance(reply.result, expected):
        raise ProtocolError(f"the pool answered with {type(reply.result).__name__} where {expected.__name__} is due")
    return reply.result


class Calls:
    """Builds the requests of one space.

    draw_seed: gives seeds of 0 to 2^53 - 1, which every JSON reader keeps exactly, for answers that need one and have none.
    Everything raises BadRequest, with the field, for what the table of limits refuses: before it travels.
    """

    def __init__(self, space: str, draw_seed: Callable[[], int]) -> None:
        self.space: Final = space
        self._draw_seed = draw_seed

    def info(self, **options: Any) -> Call[InfoResult]:
        return Call(self._make(Info, options), InfoResult, _whole)

    def stats(self, **options: Any) -> Call[StatsResult]:
        return Call(self._make(Stats, options), StatsResult, _whole)

    def story(self, id: str, **options: Any) -> Call[tuple[StoryEvent, ...]]:
        return Call(self._make(Story, options, id=id), StoryResult, lambda r: r.events)

    def tokenize(self, text: str, **options: Any) -> Call[TokenizeResult]:
        return Call(self._make(Tokenize, options, text=text), TokenizeResult, _whole)

    def create_context(self, prompt: Prompt | None, **options: Any) -> Call[ContextResult]:
        return Call(self._make(ContextCreate, options, **_prompt(prompt)), ContextResult, _whole)

    def contexts(self, **options: Any) -> Call[tuple[ContextInfo, ...]]:
        return Call(self._make(ContextList, options), ContextListResult, lambda r: r.contexts)

    def context(self, context: str, **options: Any) -> Call[ContextInfo]:
        return Call(self._make(ContextGet, options, context=context), ContextResult, lambda r: r.context)

    def drop_context(self, context: str, **options: Any) -> Call[str]:
        return Call(self._make(ContextDrop, options, context=context), ContextDropResult, lambda r: r.id)

    def save_context(self, context: str, **options: Any) -> Call[SavedInfo]:
        return Call(self._make(ContextSave, options, context=context), SavedResult, lambda r: r.info)

    def load_context(self, saved: str, **options: Any) -> Call[ContextResult]:
        return Call(self._make(ContextLoad, options, saved=saved), ContextResult, _whole)

    def saved_contexts(self, **options: Any) -> Call[tuple[SavedInfo, ...]]:
        return Call(self._make(ContextSaved, options), SavedListResult, lambda r: r.contexts)

    def generate(self, prompt: Prompt | None, *, stream: bool, **options: Any) -> Call[GenerateResult]:
        sampling = options.get("sampling") or Sampling()
        if sampling.temperature > 0 and sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._draw_seed())
        options |= {"sampling": sampling, "stop": tuple(options.get("stop") or ())}
        return Call(self._make(Generate, options, **_prompt(prompt), stream=stream), GenerateResult, _whole)

    def score(self, prompt: Prompt | None, labels: Sequence[str | Sequence[int]], **options: Any) -> Call[ScoreResult]:
        told = tuple(label if isinstance(label, str) else tuple(int(t) for t in label) for label in labels)
        return Call(self._make(Score, options, **_prompt(prompt), labels=told), ScoreResult, _whole)

    def cancel(self, request_id: str, **options: Any) -> Call[bool]:
        return Call(self._make(Cancel, options, id=request_id), CancelResult, lambda r: r.found)

    def _make(self, kind: Callable[..., _Request], options: Mapping[str, Any], **fields: Any) -> _Request:
        given = {key: value for key, value in options.items() if value is not None}
        if "template_args" in given:
            given["template_args"] = dict(given["template_args"])
        request = kind(space=self.space, **fields, **given)
        try:
            msgspec.convert(msgspec.to_builtins(request, builtin_types=(bytes,)), cast(Any, kind))
        except (msgspec.ValidationError, UnicodeEncodeError) as e:
            words, _, path = str(e).partition(" - at `$.")
            raise BadRequest(words, path=path.rstrip("`") or None) from None
        return request


def encoded(request: Request) -> bytes:
    """The body of a request. Raises BadRequest for text that cannot be written down or a body that is too large."""
    try:
        body = protocol.encode(request)
    except UnicodeEncodeError as e:
        raise BadRequest(f"the request holds text that is no Unicode: {e.reason}") from None
    if len(body) > protocol.LIMITS.body_bytes:
        raise BadRequest(f"a body of {len(body)} bytes; at most {protocol.LIMITS.body_bytes} are taken", path="body")
    return body


def _whole(result: T) -> T:
    return result


def _prompt(prompt: Prompt | None) -> dict[str, Any]:
    """The one field of text, tokens, messages that the prompt is."""
    if prompt is None:
        return {}
    if isinstance(prompt, str):
        return {"text": prompt}
    items = list(prompt)
    if items and isinstance(items[0], Message | Mapping):
        try:
            return {"messages": tuple(msgspec.convert(m, Message, from_attributes=True) for m in items)}
        except msgspec.ValidationError as e:
            raise BadRequest(str(e), path="messages") from None
    try:
        return {"tokens": tuple(int(cast(int, t)) for t in items)}
    except (TypeError, ValueError) as e:
        raise BadRequest(f"a prompt is text, token ids or messages: {e}", path="tokens") from None

"""Fills the generated parts of docs/protocol.md from `geist_pool.protocol` and `geist_pool.errors`.

    python docs/make_protocol.py           # writes them
    python docs/make_protocol.py --check   # exits with 1 where they are not what they should be

A part stands between `<!-- make NAME -->` and `<!-- made -->`, where NAME is a struct, `limits`, `errors` or `bytes`. What a
field means is the comment behind it in protocol.py, or stands in `WORDS`.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect as mi

from geist_pool import errors, protocol

PAGE = Path(__file__).with_name("protocol.md")
MARKS = re.compile(r"(?<=<!-- make )(\w+)( -->\n)(.*?)(?=<!-- made -->)", re.DOTALL)
SHARED = {
    "_Request": "EveryRequest",
    "_Prompted": "Prompt",
    "_Served": "Served",
}
LOCAL_CODES = {"config", "no_answer", "protocol", "download", "name_taken", "pool_lost"}
"""Errors that no broker sends."""

TYPES = {"Reply.result": "a result, one of those below"}
"""Where the type in full says less than a word."""

WORDS = {
    "_Request.space": "which contexts the request sees",
    "_Prompted.text": "the prompt as text",
    "_Prompted.messages": "the prompt as chat messages, rendered by the model's template",
    "_Prompted.tokens": "the prompt as token ids",
    "_Prompted.special": "whether texts of control tokens in it become those tokens; without it they are `bad_request`",
    "_Prompted.template_args": "variables of the template, such as `enable_thinking`",
    "Message.role": "as the template knows it: `system`, `user`, `assistant`, ...",
    "Tokenize.text": "what to tokenise",
    "ContextCreate.name": "a name to find it by; a name that another context of the space has goes over to this one",
    "ContextCreate.ttl_s": "seconds until it is forgotten",
    "ContextGet.context": "id or name",
    "ContextDrop.context": "id or name",
    "ContextSave.context": "id or name",
    "ContextSave.saved": "its name in the directory; by default the context's name",
    "ContextLoad.saved": "its name in the directory",
    "ContextLoad.ttl_s": "seconds until it is forgotten",
    "ContextLoad.pin": "never evicted",
    "Publish.name": "as in `context.create`",
    "Publish.ttl_s": "as in `context.create`",
    "Publish.pin": "as in `context.create`",
    "Story.id": "id of a request, job, context or worker",
    "Generate.context": "id or name of the context that is continued",
    "Generate.max_tokens": "at most so many new tokens",
    "Generate.sampling": "how they are drawn",
    "Generate.stop": "texts that end the answer and are no part of it; each 256 bytes at most",
    "Generate.stream": "send chunks before the final reply; not on a REQ envelope",
    "Generate.n": "so many answers from one state; sample i draws from stream `sampling.stream` + i",
    "Score.context": "id or name of the context that is continued",
    "Score.labels": "texts or token ids, at most 64 tokens each; none may be empty",
    "Usage.reused": "tokens taken from a snapshot",
    "Usage.prefilled": "tokens computed for this request's prompt",
    "Usage.generated": "tokens generated, or scored",
    "Timings.queue": "waiting for a worker",
    "Timings.attach": "taking up the context",
    "Timings.prefill": "computing the prompt's tokens",
    "Timings.decode": "generating",
    "Timings.score": "scoring labels",
    "Timings.publish": "writing the context to shared memory",
    "Timings.total": "from arrival to reply, at the broker",
    "Mismatch.context": "id of the nearest context",
    "Mismatch.position": "the first token at which it differs from the prompt",
    "ContextInfo.parent": "id of the context that it continues",
    "ContextInfo.pinned": "never evicted",
    "ContextInfo.leases": "requests that hold it now",
    "TokenLogprob.top": "[token, logprob] of the likeliest tokens, likeliest first",
    "_Served.worker": "which worker did it",
    "_Served.attempts": "how many workers were needed",
    "_Served.join": "`split`: the last token on the left would have merged across the join",
    "_Served.mismatch": "why no more was reused",
    "InfoResult.protocol": "this page's version, 1",
    "InfoResult.version": "of the program",
    "InfoResult.fingerprint": "hexadecimal; two pools of one fingerprint give the same answers",
    "InfoResult.n_ctx": "most tokens of prompt and answer together",
    "InfoResult.has_template": "whether `messages` can be used",
    "InfoResult.slots": "requests that each worker holds at a time",
    "GenerateChunk.text": "text that became certain",
    "LabelScore.sum": "of `logprobs`",
    "LabelScore.mean": "`sum` divided by the number of tokens",
    "Reply.ok": "whether `result` is there, or `error`",
    "Reply.final": "false for a chunk",
    "ErrorBody.code": "one of the table below",
    "ErrorBody.message": "a sentence for people",
    "ErrorBody.path": "the field that is at fault, as in `messages[2].content`",
    "ErrorBody.retry_after": "seconds after which it makes sense to try again",
    "ErrorBody.data": "figures, by name",
    "StatsResult.queue": "requests that wait for a worker",
    "StatsResult.workers_busy": "workers that hold a job",
    "StatsResult.store_bytes": "taken by contexts",
    "StatsResult.store_limit": "what contexts may take",
    "StatsResult.store_orphaned_bytes": "blocks kept for contexts that continue one that is gone",
    "StatsResult.store_unmapping_bytes": "given up, and still mapped by a worker",
    "StatsResult.jobs_retried": "given to another worker",
    "StatsResult.workers_lost": "died or stopped answering",
    "StatsResult.chunks_dropped": "of clients that did not read",
    "StatsResult.attach_count": "contexts taken up by workers",
    "StoryEvent.what": "what happened",
    "StoryEvent.fields": "counts and ids",
    "GenerateResult.text": "with U+FFFD where the bytes are no UTF-8",
    "GenerateResult.bytes": "the exact bytes of the answer",
    "GenerateResult.seed": "what drew the tokens: the request's, or the one that the broker drew",
    "ContextResult.context": "what it is",
}


def structs() -> dict[str, type[msgspec.Struct]]:
    """Every struct that a client sends or gets, by name, those of requests first."""
    found: dict[str, type[msgspec.Struct]] = {}

    def enter(kind: mi.Type) -> None:
        if isinstance(kind, mi.StructType) and kind.cls.__name__ not in found:
            found[kind.cls.__name__] = kind.cls
            for field in kind.fields:
                enter(field.type)
        for part in ("item_type", "key_type", "value_type"):
            if hasattr(kind, part):
                enter(getattr(kind, part))
        for part in ("types", "item_types"):
            for each in getattr(kind, part, ()):
                enter(each)

    for root in (*get_args(protocol.Request), protocol.Reply, *get_args(protocol.Result)):
        enter(mi.type_info(root))
    return found


def _comments(cls: type) -> dict[str, str]:
    """The comment behind each field of a class, by its name in Python."""
    lines = textwrap.dedent(inspect.getsource(cls)).splitlines()
    body = ast.parse("\n".join(lines)).body[0]
    assert isinstance(body, ast.ClassDef)
    out = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            _, mark, words = lines[node.end_lineno - 1 if node.end_lineno else 0].partition("  # ")
            if mark:
                out[node.target.id] = re.sub(r"\bNone\b", "null", words.strip())
    return out


def _owner(cls: type, field: str) -> type:
    """The class of the hierarchy that brings the field in."""
    return next(c for c in reversed(cls.__mro__) if field in getattr(c, "__annotations__", {}))


def _between(low: object, high: object) -> str:
    if low is not None and high is not None:
        return f", {low} to {high}"
    return f", from {low}" if low is not None else f", up to {high}" if high is not None else ""


def spell(kind: mi.Type) -> str:
    """A type in words."""
    match kind:
        case mi.StrType():
            return "string" + _between(kind.min_length, kind.max_length)
        case mi.IntType():
            low = kind.ge if kind.ge is not None else None if kind.gt is None else kind.gt + 1
            high = kind.le if kind.le is not None else None if kind.lt is None else kind.lt - 1
            return "integer" + _between(low, high)
        case mi.FloatType():
            ends = {"from": kind.ge, "above": kind.gt, "up to": kind.le, "below": kind.lt}
            return "number" + "".join(f", {word} {end:g}" for word, end in ends.items() if end is not None)
        case mi.BoolType():
            return "boolean"
        case mi.BytesType():
            return "bytes (base64 in JSON)"
        case mi.NoneType():
            return "null"
        case mi.AnyType() | mi.CustomType():
            return "any"
        case mi.LiteralType():
            return ", ".join(f"`{v}`" for v in kind.values)
        case mi.VarTupleType():
            of = spell(kind.item_type)
            return f"array{_between(kind.min_length, kind.max_length)} of {f'({of})' if ',' in of or ' or ' in of else of}"
        case mi.TupleType():
            return "array [" + ", ".join(spell(t) for t in kind.item_types) + "]"
        case mi.DictType():
            return f"map of string to {spell(kind.value_type)}"
        case mi.UnionType():
            return " or ".join(spell(t) for t in kind.types)
        case mi.StructType():
            return f"[{kind.cls.__name__}](#{kind.cls.__name__.lower()})"
    raise TypeError(f"no words for {kind}")


def table(cls: type[msgspec.Struct]) -> Iterator[str]:
    """A struct's own fields; those it shares with others stand in a table of their own."""
    info = mi.type_info(cls)
    assert isinstance(info, mi.StructType)
    shared = []
    rows = []
    if info.tag_field is not None:
        rows.append(f"| `{info.tag_field}` | `{info.tag}` | required | |")
    for field in info.fields:
        owner = _owner(cls, field.name)
        if owner is not cls:
            if owner.__name__ not in shared:
                shared.append(owner.__name__)
            continue
        rows.append(_row(owner, field))
    if rows:
        yield from ("| field | type | default | |", "|---|---|---|---|", *rows)
    if shared:
        yield from ("", "Also the fields of " + " and ".join(f"[{SHARED[s]}](#{SHARED[s].lower()})" for s in shared) + ".")


def _row(owner: type, field: mi.Field) -> str:
    words = WORDS.get(f"{owner.__name__}.{field.encode_name}") or _comments(owner).get(field.name, "")
    if field.required:
        default = "required"
    elif field.default is not msgspec.NODEFAULT:
        value = msgspec.to_builtins(field.default)
        default = "" if value is None else f"`{json.dumps(value)}`" if not isinstance(value, dict) else "see there"
    else:
        default = "`{}`" if field.default_factory in (dict,) else "`[]`"
    kind = TYPES.get(f"{owner.__name__}.{field.encode_name}") or spell(field.type)
    if not field.required:  # absent is as good as null
        kind = kind.replace(" or null", "").replace("null or ", "")
    return f"| `{field.encode_name}` | {kind} | {default} | {words.replace('|', chr(92) + '|')} |"


def shared_table(name: str) -> Iterator[str]:
    base = getattr(protocol, next(k for k, v in SHARED.items() if v == name))
    info = mi.type_info(base)
    assert isinstance(info, mi.StructType)
    yield from ("| field | type | default | |", "|---|---|---|---|")
    yield from (_row(base, field) for field in info.fields if field.name in base.__annotations__)


def limits() -> Iterator[str]:
    words = _comments(protocol.Limits)
    yield from ("| limit | value | |", "|---|---|---|")
    for name in protocol.Limits.__struct_fields__:
        yield f"| `{name}` | {getattr(protocol.LIMITS, name)} | {words.get(name, '')} |"


def error_codes() -> Iterator[str]:
    yield from ("| code | meaning |", "|---|---|")
    for code, cls in sorted(errors.CODES.items()):
        if code not in LOCAL_CODES:
            yield f"| `{code}` | {' '.join((cls.__doc__ or '').split())} |"


def example_bytes() -> Iterator[str]:
    """One request in both codings, and the answer."""
    body = b'{"op": "tokenize", "text": "Hi"}'
    packed = msgspec.msgpack.encode({"op": "tokenize", "text": "Hi"})
    result = protocol.Reply(ok=True, result=protocol.TokenizeResult(tokens=(18, 75)))
    error = protocol.Reply(ok=False, error=protocol.ErrorBody("bad_request", "Object missing required field `text`"))

    def frames(what: str, *parts: bytes) -> Iterator[str]:
        yield what
        for part in parts:
            if part.isascii() and part.decode("ascii").isprintable():
                yield f"  {len(part):3} bytes  {part.decode('ascii')}"
            else:
                first, *more = textwrap.wrap(part.hex(" "), 72)
                yield f"  {len(part):3} bytes  {first}"
                yield from (f"             {line}" for line in more)

    yield "```text"
    yield from frames("a request in JSON, as a DEALER sends it", b"GP1", b"7", body)
    yield from frames("its answer", b"GP1", b"7", msgspec.json.encode(result))
    yield from frames("the same request in MessagePack", b"GP1", b"7", packed)
    yield from frames("its answer", b"GP1", b"7", msgspec.msgpack.encode(result))
    yield from frames('an error, to {"op": "tokenize"}', b"GP1", b"7", msgspec.json.encode(error))
    yield "```"


def part(name: str) -> str:
    special: dict[str, Any] = {"limits": limits, "errors": error_codes, "bytes": example_bytes}
    if name in special:
        lines = special[name]()
    elif name in SHARED.values():
        lines = shared_table(name)
    else:
        lines = table(structs()[name])
    return "\n".join(lines) + "\n"


def fill(text: str) -> str:
    """The page with every part made anew."""
    return MARKS.sub(lambda m: m[1] + m[2] + part(m[1]), text)


def main() -> int:
    old = PAGE.read_text()
    new = fill(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

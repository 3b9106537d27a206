"""Chat templates: jinja2 in its sandbox, set up as `transformers` sets it up for `apply_chat_template`.

A template is code out of a model file. The sandbox keeps it from the interpreter's objects, not from holding
the processor or filling memory: only `broker/template_process.py`, which can be killed, calls this module.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from geist_pool.errors import TemplateError, Unsupported

RESERVED_NAMES = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception", "strftime_now"})
"""Variables that a request's template arguments cannot replace."""

OUTPUT_CHARS_MAX = 1 << 20
"""Default limit of a rendering, in characters."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the assistant says for training; here it is plain."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it as this)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    raise TemplateError(f"the template refuses this conversation: {message}")


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, >, & and ' for HTML and sorts keys; models were trained without either.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos_text: str,
    eos_text: str,
    add_generation_prompt: bool,
    args: Mapping[str, Any],
    chars_max: int = OUTPUT_CHARS_MAX,
) -> str:
    """The text of a conversation. `messages` are mappings with at least `role` and `content`.

    args: further variables (`enable_thinking`, `tools`, ...); names in RESERVED_NAMES are refused.
    Raises Unsupported without a template; TemplateError, in words for the client, for everything that goes
    wrong inside it, for more than `chars_max` characters, and for lack of memory.
    """
    if template is None:
        raise Unsupported("this model's file has no chat template; send text instead of messages")
    reserved = sorted(RESERVED_NAMES.intersection(args))
    if reserved:
        raise TemplateError(f"template argument {reserved[0]!r} is set by the server", path="template_args")
    variables = {"tools": None, "documents": None, **args}
    variables.update(messages=messages, add_generation_prompt=add_generation_prompt, bos_token=bos_text, eos_token=eos_text)
    parts: list[str] = []
    n_chars = 0
    try:
        for part in _compiled(template).generate(variables):
            n_chars += len(part)
            if n_chars > chars_max:
                raise TemplateError(f"the template writes more than {chars_max} characters")
            parts.append(part)
    except TemplateError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the template does not compile: {error.message} (line {error.lineno})") from None
    except jinja2.exceptions.SecurityError as error:
        raise TemplateError(f"the template does what the sandbox forbids: {error}") from None
    except MemoryError:
        raise TemplateError("the template needs more memory than it may have") from None
    except Exception as error:
        # Whatever a template provokes (ZeroDivisionError, RecursionError, ...) is the template's error.
        raise TemplateError(f"the template failed: {type(error).__name__}: {error}") from None
    return "".join(parts)

"""What the broker's machine and its text jobs say to each other: pure values, no I/O.

A *text job* turns what a client wrote (text, chat messages or ids) into token ids. It runs outside the
broker's loop; its result comes back as one `TextDone`, whatever happens. The machine creates a `TextJob`,
the loop hands it to `TextJobs.submit` and feeds every `TextDone` from `TextJobs.poll` back to the machine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from geist_pool.errors import GeistPoolError
from geist_pool.protocol import Message

Join = Literal["clean", "split"]
TemplateArgs = dict[str, bool | int | float | str | None]

LEFT_IDS_MAX = 8
"""How many ids of the text on the left a job carries for the join check; more are not looked at."""


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Input of a request: exactly one of the three fields is set (a job with any other count fails). Errors
    name the field as the request has it: `text`, `messages[2].content`, `tokens[5]`, `labels[0]`.

    `tokens` are taken as they are: no BOS is added, they are only checked against the vocabulary.
    """

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    tokens: tuple[int, ...] | None = None


class TextJob(msgspec.Struct, frozen=True):
    """One piece of text work.

    key: echoed in the result; the caller's own name for the job.
    prompt: what to tokenise; None when the request has labels only.
    context_tokens: all ids of the context on the left, () when there is none. The conversation rendered as
        a whole must begin with their text; the last LEFT_IDS_MAX of them are looked at for the join.
    context_messages: messages of the context on the left, None when there is no context on the left or it
        was not made from messages alone. A prompt of messages behind a context needs them (`bad_request`
        otherwise).
    context_template_args: template arguments stored with the context; the request's own go over them.
    add_bos: this prompt opens a context or a whole prompt; BOS is put in front if the model's file asks
        for it. Must be False when `context_tokens` is not empty.
    special: text of control tokens becomes control tokens, and message content may hold such text.
    add_generation_prompt: render messages up to where the assistant speaks: False when a context is
        created, True for a suffix or a whole prompt that is to be answered.
    template_args: extra variables for the template (`enable_thinking`, ...).
    labels: continuations to score, each text or ids; tokenised on their own, never with BOS.
    answer: instead of everything else: ids of an answer whose text is `answer_data`, which may end inside the last of them.
        The result's tokens are the ids that lie wholly inside it and those of the rest of its text.
    """

    key: str
    prompt: Prompt | None = None
    context_tokens: tuple[int, ...] = ()
    context_messages: tuple[Message, ...] | None = None
    context_template_args: TemplateArgs = {}
    add_bos: bool = False
    special: bool = False
    add_generation_prompt: bool = False
    template_args: TemplateArgs = {}
    labels: tuple[str | tuple[int, ...], ...] = ()
    answer: tuple[int, ...] | None = None
    answer_data: bytes = b""


class TextDone(msgspec.Struct, frozen=True):
    """Result of the job with this key: either `error` is set and the rest is empty, or the other way round.

    tokens: ids of the prompt alone (of the part behind the context, when there is one), BOS included
        where it was added.
    label_tokens: ids per label, in the order of the job; none is empty.
    join: "split" when the last token of the context would have merged with the start of the prompt's text;
        None where there is nothing on the left, or the prompt is ids or empty.
    label_joins: the same per label against what stands before it (prompt, else context); None for a label
        of ids or with nothing before it.
    messages: all messages that a context made of this job holds (the context's and the prompt's); None
        unless everything from position 0 on came from messages.
    template_args: the arguments these messages were rendered with, to be stored with such a context.
    text: the text behind `tokens`: what was rendered behind the context, or the prompt's text; None for ids.
    elapsed_us: time spent on the job, waiting in the queue not included, in microseconds.
    """

    key: str
    tokens: tuple[int, ...] = ()
    label_tokens: tuple[tuple[int, ...], ...] = ()
    join: Join | None = None
    label_joins: tuple[Join | None, ...] = ()
    messages: tuple[Message, ...] | None = None
    template_args: TemplateArgs = {}
    text: str | None = None
    elapsed_us: int = 0
    error: GeistPoolError | None = None

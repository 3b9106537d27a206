"""Property: templates render as in `transformers`, whatever they do ends in text or in a TemplateError that says what was wrong,
and a suffix is exactly what the conversation adds to the context.

Tolerance: none; texts are compared whole. Nothing here needs a model file.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geist_pool.errors import TemplateError, TemplateMismatch, Unsupported
from geist_pool.text.suffix import EXCERPT_CHARS, first_difference, suffix_of
from geist_pool.text.template import render

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As SmolLM2's: a conversation that does not open with a system message is given one.
WITH_DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As reasoning models': what an assistant thought is dropped from all turns but the last.
DROPS_THINKING = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\n') %}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def show(
    template: str, turns: list[dict[str, str]] | None = None, prompt: bool = False, limit: int = 1 << 20, **args: object
) -> str:
    return render(
        template,
        turns or [user("hi")],
        bos_text="<s>",
        eos_text="</s>",
        add_generation_prompt=prompt,
        args=args,
        chars_max=limit,
    )


def test_chatml() -> None:
    assert show(CHATML, [user("a"), assistant("b")]) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
    assert show(CHATML, prompt=True) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),  # trim_blocks, lstrip_blocks
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{{ bos_token }}|{{ eos_token }}|{{ tools }}|{{ documents }}|{{ nothing }}", "<s>|</s>|None|None|"),
        ("{{ {'b': '<é>', 'a': [1, true, none]} | tojson }}", '{"b": "<é>", "a": [1, true, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{{ '<&>' }}", "<&>"),  # no HTML escaping
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)  # fmt: skip
def test_as_transformers_renders(template: str, text: str) -> None:
    assert show(template) == text


def test_arguments_pass_through() -> None:
    template = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{{ style }}"
    assert show(template) == ""
    assert show(template, enable_thinking=False, style="x") == "<think></think>x"
    assert show("{{ tools }}", tools="[]") == "[]"


def test_strftime_now_gives_todays_year() -> None:
    assert re.fullmatch(r"20\d\d", show("{{ strftime_now('%Y') }}"))


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"])
def test_reserved_arguments_are_refused(name: str) -> None:
    with pytest.raises(TemplateError, match=f"'{name}' is set by the server"):
        show(CHATML, **{name: "x"})


def test_without_a_template() -> None:
    with pytest.raises(Unsupported, match="no chat template"):
        render(None, [user("a")], bos_text="", eos_text="", add_generation_prompt=False, args={})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this conversation: roles must alternate"),
        ("{% if %}", r"does not compile: .* \(line 1\)"),
        ("\n\n{% endfor %}", r"\(line 3\)"),
        ("{{ 1 // 0 }}", "failed: ZeroDivisionError"),
        ("{{ messages[0]['content'] + 1 }}", "failed: TypeError"),
        ("{{ nothing.attribute }}", "failed: UndefinedError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed: RecursionError"),
        ("{% include 'other' %}", "failed: TypeError"),
        ("{{ range(10000000) | list }}", "failed: OverflowError"),
    ],
)
def test_errors_say_what_was_wrong(template: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        show(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__globals__ }}",
        "{{ render.__globals__ }}",
        "{{ self._TemplateReference__context.environment.globals }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].system('id') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
        "{{ ('%s' | attr('__class__')).__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% set _ = messages.pop() %}",
        "{{ ''['__class__']['__mro__'] }}",
        "{% for f in [strftime_now] %}{{ f.__code__.co_consts }}{% endfor %}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    # Reading what is forbidden gives an undefined value, which prints as nothing; using it is an error.
    turns = [user("hi"), assistant("ho")]
    try:
        assert show(template, turns) == ""
    except TemplateError as error:
        assert re.search("sandbox forbids|failed: UndefinedError", error.message)
    assert turns == [user("hi"), assistant("ho")]


def test_output_is_limited_to_the_character() -> None:
    assert len(show("{% for i in range(100) %}ab{% endfor %}", limit=200)) == 200
    with pytest.raises(TemplateError, match="more than 199 characters"):
        show("{% for i in range(100) %}ab{% endfor %}", limit=199)
    with pytest.raises(TemplateError, match="more than 1048576 characters"):
        show("{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}")


# ---- suffixes


def suffix(template: str, context: list[dict[str, str]], more: list[dict[str, str]]) -> str:
    return suffix_of(show(template, context), show(template, context + more, prompt=True))


def test_suffix_of_a_conversation() -> None:
    assert suffix(CHATML, [user("a")], [assistant("b"), user("c")]) == (
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


def test_no_second_system_prompt() -> None:
    context = [user("Where am I?"), assistant("In a tavern.")]
    alone = show(WITH_DEFAULT_SYSTEM, [user("Who is here?")], prompt=True)
    assert alone.startswith("<|im_start|>system")
    assert suffix(WITH_DEFAULT_SYSTEM, context, [user("Who is here?")]) == (
        "<|im_start|>user\nWho is here?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_changed_history_is_a_mismatch_that_says_where() -> None:
    """FINDINGS row 20: a turn's thinking leaves the history, so the context is no prefix of the next turn."""
    context = [user("Name a river."), assistant("<think>\nThe Elbe, say.\n</think>\n\nThe Elbe.")]
    with pytest.raises(TemplateMismatch) as caught:
        suffix(DROPS_THINKING, context, [user("Another.")])
    shown = show(DROPS_THINKING, context)
    position = shown.index("<think>")
    data = caught.value.data
    assert data["position"] == position
    assert data["context"] == shown[position : position + EXCERPT_CHARS]
    assert str(data["rendered"]).startswith("The Elbe.<|im_end|>\n<|im_start|>user\nAnother.")
    assert f"character {position}" in str(caught.value)
    # Where the assistant did not think, nothing changes and the suffix is exact.
    assert suffix(DROPS_THINKING, [user("a"), assistant("b")], [user("c")]).startswith("<|im_start|>user\nc")


def test_mismatch_shows_a_bounded_part_of_each_text() -> None:
    with pytest.raises(TemplateMismatch) as caught:
        suffix_of("same" + "a" * 5000, "same" + "b" * 5000, path="messages")
    assert caught.value.path == "messages"
    assert caught.value.data == {"position": 4, "context": "a" * EXCERPT_CHARS, "rendered": "b" * EXCERPT_CHARS}
    assert len(caught.value.message) < 3 * EXCERPT_CHARS
    with pytest.raises(TemplateMismatch) as caught:
        suffix_of("same and more", "same")
    assert caught.value.data == {"position": 4, "context": " and more", "rendered": ""}


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_first_difference(left: str, right: str) -> None:
    n = first_difference(left, right)
    assert left[:n] == right[:n]
    assert n == min(len(left), len(right)) or left[n] != right[n]

"""Property: text and stop strings do not depend on how the bytes are cut into tokens, and no bytes are lost.

Tolerance: none, all comparisons are of whole byte strings or texts: the reference is Python's own decoder over the whole, and a
scan for stop strings byte by byte that is too slow to use and too simple to be wrong.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from geist_pool.text.stream import ByteStream, StopMatcher

# Bytes that start, continue or break characters, more often than chance would have them.
_hard_bytes = st.binary(max_size=3) | st.sampled_from(
    [b"\xe2\x82\xac", b"\xe2\x82", b"\xf0\x9f\x98\x80", b"\xf0\x9f\x98", b"\xf0\x9f", b"\xc3", b"\x80", b"\xed\xa0\x80",
     b"\xed", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\xf5", b"\xe0\x80", b"\xe0\xa0", b"\xf0\x80", b"\xff", b"a", b"e\xcc\x81"]
)  # fmt: skip
_chunks = st.lists(_hard_bytes, max_size=12)


@given(_chunks)
@example([b"\xe2", b"\x82", b"\xac"])
@example([b"\xed", b"\xa0", b"\x80", b"x"])
@example([b"\xf0\x9f", b"\x98", b"a"])
def test_text_equals_decoding_the_whole(chunks: list[bytes]) -> None:
    stream = ByteStream()
    text = "".join(stream.feed(c) for c in chunks) + stream.finish()
    assert text == b"".join(chunks).decode("utf-8", "replace")


@given(_chunks)
def test_only_what_may_become_a_character_is_held_back(chunks: list[bytes]) -> None:
    stream = ByteStream()
    for chunk in chunks:
        stream.feed(chunk)
        held = stream.held
        assert len(held) <= 3
        if held:
            assert any(_is_character(held + rest) for rest in _CONTINUATIONS), held


_CONTINUATIONS = [bytes([first, *rest]) for first in (0x80, 0x90, 0xA0, 0xBF) for rest in ([], [0x80], [0x80, 0x80])]


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False


def test_finish_starts_afresh() -> None:
    stream = ByteStream()
    assert stream.feed(b"a\xe2\x82") == "a"
    assert stream.held == b"\xe2\x82"
    assert stream.finish() == "�"
    assert stream.feed(b"b") == "b"
    assert stream.finish() == ""


def _by_hand(data: bytes, stops: list[bytes]) -> tuple[bytes, int | None]:
    """The text before the stop string that ends first (longest, then lowest index, of several)."""
    for end in range(len(data) + 1):
        ending = [(-len(s), i) for i, s in enumerate(stops) if data[:end].endswith(s)]
        if ending:
            length, index = min(ending)
            return data[: end + length], index
    return data, None


_letters = st.binary(max_size=24).map(lambda b: bytes(b"ab\xe2"[x % 3] for x in b))
_stops = st.lists(_letters.filter(len).map(lambda b: b[:5]), max_size=4)


@st.composite
def _cut(draw: st.DrawFn) -> list[bytes]:
    data = draw(_letters)
    places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@given(_cut(), _stops)
@example([b"aab", b"ab"], [b"abab", b"b"])
@example([b"a", b"b", b"a"], [b"aba", b"ba"])
def test_stop_strings_do_not_depend_on_the_cuts(chunks: list[bytes], stops: list[bytes]) -> None:
    matcher = StopMatcher(stops)
    out = b""
    matched = None
    for chunk in chunks:
        emitted, matched = matcher.feed(chunk)
        out += emitted
        # What is emitted is final at every moment, not only at the end.
        assert _by_hand(b"".join(chunks), stops)[0].startswith(out)
    out += matcher.finish()
    assert (out, matched) == _by_hand(b"".join(chunks), stops)


@given(_cut(), _stops)
def test_held_bytes_are_the_start_of_a_stop_string(chunks: list[bytes], stops: list[bytes]) -> None:
    matcher = StopMatcher(stops)
    for chunk in chunks:
        matcher.feed(chunk)
        assert matcher.held == b"" or any(s.startswith(matcher.held) and s != matcher.held for s in stops)


def test_after_a_match_nothing_more_comes() -> None:
    matcher = StopMatcher([b"\n\n", b"END"])
    assert matcher.feed(b"one\n") == (b"one", None)
    assert matcher.held == b"\n"
    assert matcher.feed(b"two EN") == (b"\ntwo ", None)
    assert matcher.feed(b"D and more") == (b"", 1)
    assert matcher.feed(b"more") == (b"", 1)
    assert matcher.finish() == b""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([b"a", b""])


def test_streams_load_no_tokenizer_and_no_template_engine() -> None:
    code = (
        "import sys, geist_pool.text.stream, geist_pool.text.vocabulary; "
        "sys.exit(any(m.split('.')[0] in ('tokenizers', 'jinja2') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Property: pieces of a SentencePiece vocabulary are joined by score, of equal scores the leftmost pair first; what is no
piece becomes bytes; added tokens are cut out first; ids equal llama.cpp's on Gemma 3 270M (tests/data/gemma3).

Tolerance: none. The tiny vocabulary of the oracle is tested in test_text_tokenizer.py."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import msgspec
import pytest

from geist_pool.errors import GeistPoolError, ModelError, Unsupported
from geist_pool.text.tokenizer import Tokenizer
from geist_pool.text.vocabulary import Vocabulary

BYTES = tuple(f"<0x{b:02X}>" for b in range(256))


def _small(pieces: dict[str, float], *, added: tuple[str, ...] = ()) -> Vocabulary:
    """<unk>, <s>, </s>, 256 bytes, then the pieces, then user-defined tokens."""
    tokens = ("<unk>", "<s>", "</s>", *BYTES, *pieces, *added)
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=tokens,
        types=(2, 3, 3, *[6] * 256, *[1] * len(pieces), *[4] * len(added)),
        merges=(),
        scores=(0.0,) * 259 + tuple(pieces.values()) + (0.0,) * len(added),
        bos=1,
        add_bos=True,
    )


def _texts(vocabulary: Vocabulary, text: str, special: bool = False) -> list[str]:
    tokenizer = Tokenizer(vocabulary)
    ids = tokenizer.encode(text, special=special)
    assert tokenizer.decode_bytes(ids, special=True) == text.encode()
    return [vocabulary.tokens[i] for i in ids]


def test_highest_score_first() -> None:
    v = _small({"a": -9, "b": -9, "c": -9, "ab": -2, "bc": -1, "abc": -3})
    assert _texts(v, "abc") == ["abc"]
    v = _small({"a": -9, "b": -9, "c": -9, "ab": -2, "bc": -1})
    assert _texts(v, "abc") == ["a", "bc"]


def test_of_equal_scores_the_leftmost() -> None:
    """Not so with merges: "aa" "a" and "a" "aa" would have ranks of their own."""
    v = _small({"a": -9, "aa": -1, "aaa": -2})
    assert _texts(v, "aaa") == ["aaa"]
    assert _texts(v, "aaaa") == ["aa", "aa"]
    assert _texts(v, "aaaaa") == ["aa", "aaa"]  # "aa" "aa" "a": the pair on the right is the only one
    v = _small({"a": -9, "b": -9, "ab": -1, "ba": -1})
    assert _texts(v, "bab") == ["ba", "b"]


def test_bytes_for_what_is_no_piece() -> None:
    v = _small({"a": -1, "\u00e9": -1})
    assert _texts(v, "aé€\0") == ["a", "é", "<0xE2>", "<0x82>", "<0xAC>", "<0x00>"]


def test_spaces_are_pieces_and_control_tokens_are_not_reached() -> None:
    v = _small({"\u2581": -3, "a": -3, "\u2581a": -1, "<": -3, "s": -3, ">": -3, "<s": -1}, added=("  ", "   "))
    assert _texts(v, " a a") == ["\u2581a", "\u2581a"]
    assert _texts(v, "a  a    a") == ["a", "  ", "a", "   ", "\u2581a"]
    assert _texts(v, "<s>a") == ["<s", ">", "a"]
    assert _texts(v, "<s>a", special=True) == ["<s>", "a"]
    assert Tokenizer(v).encode("a\u2581a", special=False) == Tokenizer(v).encode("a a", special=False)
    assert Tokenizer(v).normalize("a\u2581a") == "a a"


def test_joins_across_runs_of_added_tokens() -> None:
    """A longer run of newlines is another token, so a join inside one is split."""
    t = Tokenizer(_small({"a": -1, "b": -1}, added=("\n", "\n\n")))
    assert t.join(t.encode("a\n", special=False), "\nb") == "split"
    assert t.join(t.encode("a\n\n", special=False), "b") == "clean"
    assert t.join([1], "a") == "clean"


def test_joins_before_a_space_are_tried() -> None:
    """There is no pre-tokenizer that would always cut before a space: a piece may hold one behind anything."""
    t = Tokenizer(_small({"\u2581": -3, "a": -3, "b": -3, ">": -3, ">\u2581": -1}))
    assert t.join(t.encode("a>", special=False), " b") == "split"
    assert t.join(t.encode("a", special=False), " b") == "clean"
    assert t.join(t.encode("a", special=False), " b", t.encode(" b", special=False)) == "clean"


def test_cutting_at_spaces_changes_nothing() -> None:
    """Random vocabularies, some with pieces that hold a space inside, against the rule applied to the whole text."""

    def whole(v: Vocabulary, text: str) -> list[str]:
        known = {t: v.scores[i] for i, t in enumerate(v.tokens) if v.types[i] == 1}
        pieces = list(text.replace(" ", "\u2581"))
        while True:
            pairs = [(-known[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in known]
            if not pairs:
                return pieces
            _, i = heapq.nsmallest(1, pairs)[0]
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]

    draw = random.Random(5)
    for _ in range(300):
        letters = "ab>\u2581"
        pieces = dict.fromkeys(letters, -99.0)
        for _ in range(12):
            pieces["".join(draw.choices(letters, k=draw.randint(2, 4)))] = -float(draw.randint(1, 6))
        v = _small(pieces)
        text = "".join(draw.choices("ab> ", k=30))
        assert _texts(v, text) == whole(v, text)


def test_a_vocabulary_without_a_byte_is_refused() -> None:
    v = _small({"a": -1})
    types = list(v.types)
    types[3 + 0x41] = 5
    with pytest.raises(ModelError, match="0x41"):
        Tokenizer(msgspec.structs.replace(v, types=tuple(types)))


def test_metadata(metadata_of: Callable[[str], dict[str, object]]) -> None:
    found = metadata_of("gemma3-tiny")
    v = Vocabulary.from_metadata(found.get)
    assert (v.model, len(v.tokens), len(v.scores), v.merges, v.bos, v.eos, v.add_bos) == ("llama", 512, 512, (), 2, 1, True)
    assert v.piece(v.tokens.index("<0x0A>")) == b"\n"
    assert v.piece(v.tokens.index("\u2581the")) == b" the"
    del found["tokenizer.ggml.add_bos_token"]
    assert Vocabulary.from_metadata(found.get).add_bos  # these models are trained with it


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("add_space_prefix", True, Unsupported, "space before every text"),
        ("add_space_prefix", None, Unsupported, "space before every text"),
        ("remove_extra_whitespaces", True, Unsupported, "normalised"),
        ("precompiled_charsmap", b"x", Unsupported, "normalised"),
        ("scores", None, ModelError, "missing"),
        ("scores", [0.0] * 511, ModelError, "511 entries for 512"),
        ("scores", [0.0] * 511 + [float("nan")], ModelError, r"\[511\] is nan"),
        ("scores", [0.0] * 511 + ["x"], ModelError, r"\[511\]"),
    ],
)
def test_refusals(
    metadata_of: Callable[[str], dict[str, object]], key: str, value: object, error: type[GeistPoolError], words: str
) -> None:
    found = {**metadata_of("gemma3-tiny"), f"tokenizer.ggml.{key}": value}
    with pytest.raises(error, match=words) as caught:
        Vocabulary.from_metadata(found.get)
    assert caught.value.path == f"tokenizer.ggml.{key}"

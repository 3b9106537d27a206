"""Property: token ids equal the reference's on every text of every fixture, control tokens parsed and not; bytes come back exact.

Tolerance: none. The fixtures hold ids made with the tiny models' own tokenizer files (tests/data/oracle/refs) and by llama.cpp
(tests/data/smollm2).
"""

from __future__ import annotations

import json
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geist_pool.errors import BadRequest, ModelError
from geist_pool.text.checks import check_no_nul
from geist_pool.text.tokenizer import Tokenizer
from geist_pool.text.vocabulary import BYTE_OF_CHAR, Vocabulary

VocabularyOf = Callable[[str], Vocabulary]
DATA = Path(__file__).resolve().parents[1] / "data"
REFS = DATA / "oracle" / "refs"
MODELS = [
    "llama-tiny",
    "llama3rope-tiny",
    "qwen3-tiny",
    "qwen35-kq",
    "qwen35-tiny",
    "qwen35-tiny-gqa",
    "qwen35-tiny-mtp",
    "gemma3-tiny",
]


@pytest.fixture(scope="session")
def llama(vocabulary_of: VocabularyOf) -> Tokenizer:
    return Tokenizer(vocabulary_of("llama-tiny"))


def _reference(case: dict[str, list[int]]) -> list[int]:
    """The library's, where it has any: `sentencepiece` parses no control tokens, llama.cpp does."""
    return case["ids"] if "ids" in case else case["llama_ids"]


@pytest.mark.parametrize("model", MODELS)
def test_ids_equal_the_fixtures(model: str, vocabulary_of: VocabularyOf) -> None:
    tokenizer = Tokenizer(vocabulary_of(model))
    cases = json.loads((REFS / f"{model}-tokenizer.json").read_text())
    assert len(cases) == 68
    assert {c["parse_special"] for c in cases} == {True, False}
    wrong = [c for c in cases if tokenizer.encode(c["text"], special=c["parse_special"]) != _reference(c)]
    assert wrong == []


@pytest.mark.parametrize("model", MODELS)
def test_bytes_of_the_ids_are_the_text(model: str, vocabulary_of: VocabularyOf) -> None:
    tokenizer = Tokenizer(vocabulary_of(model))
    for case in json.loads((REFS / f"{model}-tokenizer.json").read_text()):
        data = tokenizer.decode_bytes(_reference(case), special=True)
        text = case["text"] if model.startswith(("llama", "gemma3")) else unicodedata.normalize("NFC", case["text"])
        assert data == text.encode("utf-8")


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_bytes_of_any_text_come_back(text: str, llama: Tokenizer) -> None:
    for special in (True, False):
        assert llama.decode_bytes(llama.encode(text, special=special), special=True) == text.encode("utf-8")


def _small(pre: str = "gpt2", **changes: object) -> Vocabulary:
    """The 256 bytes, "he", "hel", a control token, a user-defined token, an unused one; ids in that order from 256 on."""
    base = Vocabulary(
        model="gpt2",
        pre=pre,
        tokens=(*BYTE_OF_CHAR, "he", "hel", "<|im_end|>", "<think>", "hell", "12", "Ġ", "ĠĠ"),
        types=(*[1] * 256, 1, 1, 3, 4, 5, 1, 1, 1),
        merges=("h e", "he l", "1 2", "Ġ Ġ"),
    )
    return msgspec.structs.replace(base, **changes)


def _ids(*parts: str | int) -> list[int]:
    chars = list(BYTE_OF_CHAR)
    return [p if isinstance(p, int) else chars.index(p) for p in parts]


@pytest.mark.parametrize("pre", ["gpt2", "smollm", "llama-bpe", "qwen2", "qwen35"])
def test_every_pre_tokenizer_keeps_the_bytes(pre: str) -> None:
    tokenizer = Tokenizer(_small(pre))
    text = "  the 12  quick\n\n\tbrown-fox's   Fluß 123456 日本語 ́ é 😀\r\n  end  "
    data = tokenizer.decode_bytes(tokenizer.encode(text, special=False), special=False)
    want = unicodedata.normalize("NFC", text) if pre.startswith("qwen") else text
    assert data.decode("utf-8") == want


def test_digits_stand_alone_where_the_model_wants_it() -> None:
    assert Tokenizer(_small("gpt2")).encode("12", special=False) == [261]
    assert Tokenizer(_small("llama-bpe")).encode("12", special=False) == [261]
    for pre in ("smollm", "qwen2", "qwen35"):
        assert Tokenizer(_small(pre)).encode("12", special=False) == _ids("1", "2")


def test_user_defined_tokens_are_cut_out_control_tokens_only_when_asked() -> None:
    tokenizer = Tokenizer(_small())
    assert tokenizer.encode("he<think>he", special=False) == [256, 259, 256]
    assert tokenizer.encode("<|im_end|>", special=True) == [258]
    plain = tokenizer.encode("<|im_end|>", special=False)
    assert 258 not in plain
    assert tokenizer.decode_bytes(plain, special=False) == b"<|im_end|>"


def test_control_tokens_cannot_be_spelled() -> None:
    # With the whole-word shortcut a piece that is an entry of the vocabulary is that token: a control token whose text is
    # one piece must still not come out of plain text. The same for merges that would lead to it.
    v = _small("llama-bpe", tokens=(*BYTE_OF_CHAR, "he", "hel", "hello", "<think>", "hell", "12", "Ġ", "ĠĠ"))
    tokenizer = Tokenizer(v)
    assert 258 not in tokenizer.encode("hello", special=False)
    assert tokenizer.encode("hello", special=True) == [258]
    with pytest.raises(ModelError, match=r"merge 4 \('hel lo'\)"):
        Tokenizer(msgspec.structs.replace(v, merges=(*v.merges, "hel lo")))


def test_a_text_that_two_tokens_share_is_the_lower_id() -> None:
    tokens = (*BYTE_OF_CHAR, "he", "hel", "he", "<think>", "hell", "12", "Ġ", "ĠĠ")
    tokenizer = Tokenizer(_small(tokens=tokens, types=(*[1] * 256, 1, 1, 1, 4, 5, 1, 1, 1)))
    assert tokenizer.encode("he<think>", special=True) == [256, 259]
    assert tokenizer.piece(258) == b"he"


def test_decode_leaves_control_tokens_out_unless_asked() -> None:
    tokenizer = Tokenizer(_small())
    ids = [256, 258, 259, 260]
    assert tokenizer.decode_bytes(ids, special=False) == b"he<think>"
    assert tokenizer.decode_bytes(ids, special=True) == b"he<|im_end|><think>"
    assert tokenizer.eog == {258}


@pytest.mark.parametrize("special", [True, False])
def test_lone_surrogates_are_refused_with_their_place(special: bool) -> None:
    with pytest.raises(BadRequest, match=r"U\+DC80 at position 2") as caught:
        Tokenizer(_small()).encode("ab\udc80cd\ud800", special=special)
    assert caught.value.data["position"] == 2


def test_characters_without_tokens_are_refused_not_dropped() -> None:
    tokens = list(_small().tokens)
    tokens[tokens.index("Ć")] = "x"  # the byte 0x06 goes, as in SmolLM2's vocabulary
    tokenizer = Tokenizer(_small(tokens=tuple(tokens)))
    assert tokenizer.encode("a\x00b", special=False) == _ids("a", "Ā", "b")
    with pytest.raises(BadRequest, match=r"no token for U\+0006 at position 3"):
        tokenizer.encode("aé\x07\x06", special=False)


def test_nul_is_text_but_no_part_of_a_name() -> None:
    check_no_nul("name", "name")
    with pytest.raises(BadRequest, match="position 2") as caught:
        check_no_nul("ab\0c", "stop[1]")
    assert caught.value.path == "stop[1]"


def test_control_text_is_found_with_its_place() -> None:
    tokenizer = Tokenizer(_small())
    assert tokenizer.has_control_text("a <think> b <|im_end |>") is None
    assert tokenizer.has_control_text("é<|im_end|><|im_end|>") == (1, "<|im_end|>")
    longer = Tokenizer(_small(tokens=(*BYTE_OF_CHAR, "<|a", "<|a|>", "hel", "<think>", "he", "12", "Ġ", "ĠĠ"),
                              types=(*[1] * 256, 3, 3, 1, 4, 1, 1, 1, 1)))  # fmt: skip
    assert longer.has_control_text("x<|a|>") == (1, "<|a|>")


def test_join() -> None:
    tokenizer = Tokenizer(_small())
    h, a = _ids("h", "a")
    assert tokenizer.join([h], "e") == "split"
    assert tokenizer.join([a], "e") == "clean"
    assert tokenizer.join([], "e") == "clean"
    assert tokenizer.join([h], "") == "clean"
    assert tokenizer.join([h, 258], "e") == "clean"  # nothing merges across a control token
    assert tokenizer.join([h, 259], "e") == "clean"  # or a user-defined one
    assert tokenizer.join([h, 260], "e") == "split"  # an unused id stands for no text
    assert tokenizer.join(_ids("â"), "e") == "clean"  # inside a character
    assert tokenizer.join([*_ids("Ĥ", "¬"), h], "e") == "split"  # starts inside one: from the first whole character on
    assert tokenizer.join(tokenizer.encode("<|im_", special=False), "end|>") == "clean"
    assert tokenizer.join(tokenizer.encode("<|im_", special=False), "end|>", special=True) == "split"


def _joining(pre: str) -> Tokenizer:
    """One that would put white space and line ends together with anything, if its pre-tokenizer let it."""
    small = _small(pre)
    pairs = [(left, right) for left in ("h", "1", ".", "'", "Ċ", "Ġ") for right in ("Ċ", "Ġ", "č", "ĉ", "h", ".")]
    pairs = [(left, right) for left, right in pairs if left + right not in small.tokens]
    return Tokenizer(
        msgspec.structs.replace(
            small,
            tokens=(*small.tokens, *(left + right for left, right in pairs)),
            types=(*small.types, *[1] * len(pairs)),
            merges=(*small.merges, *(f"{left} {right}" for left, right in pairs)),
        )
    )


_JOINS = {pre: _joining(pre) for pre in ("gpt2", "smollm", "llama-bpe", "qwen2", "qwen35")}
_JOINED = st.text("he l1 2\n\r\t.'é\xa0", min_size=1, max_size=6)


@pytest.mark.parametrize("pre", _JOINS)
@given(left=_JOINED, right=_JOINED)
def test_join_is_what_encoding_both_ways_says(pre: str, left: str, right: str) -> None:
    tokenizer = _JOINS[pre]
    ids = tokenizer.encode(left, special=False)
    right_ids = tokenizer.encode(right, special=False)
    together = tokenizer.encode(left + right, special=False)
    assert (tokenizer.join(ids, right) == "split") == (together != ids + right_ids)
    assert tokenizer.join(ids, right, right_ids) == tokenizer.join(ids, right)


def test_normalize_spells_text_as_the_ids_do(vocabulary_of: VocabularyOf, llama: Tokenizer) -> None:
    qwen = Tokenizer(vocabulary_of("qwen35-tiny"))
    text = "cafe\u0301<|im_end|>\u0338 \u212b"  # U+0338 would turn the ">" before it into another character
    assert llama.normalize(text) == text
    assert qwen.normalize(text) == "caf\u00e9<|im_end|>\u0338 \u00c5"
    ids = qwen.encode(text, special=True)
    assert qwen.decode_bytes(ids, special=True).decode() == qwen.normalize(text)


# ---- SmolLM2, where the file is here


def test_smollm2_joins_and_ends(smollm2_vocabulary: Vocabulary) -> None:
    tokenizer = Tokenizer(smollm2_vocabulary)
    left = tokenizer.encode("The mood is ", special=False)
    assert len(left) + len(tokenizer.encode("happy", special=False)) == 5
    assert len(tokenizer.encode("The mood is happy", special=False)) == 4
    assert tokenizer.join(left, "happy") == "split"
    assert tokenizer.join(tokenizer.encode("The mood is", special=False), " happy") == "clean"
    assert {smollm2_vocabulary.tokens[i] for i in tokenizer.eog} >= {"<|im_end|>", "<|endoftext|>"}
    assert tokenizer.bos() == []
    with pytest.raises(BadRequest, match=r"U\+0004"):
        tokenizer.encode("a\x04", special=False)


def test_smollm2_pieces_that_are_no_text(smollm2_vocabulary: Vocabulary) -> None:
    # 313 of its tokens are no whole UTF-8: a count that was measured once and pins the byte table.
    broken = 0
    for i in range(len(smollm2_vocabulary.tokens)):
        try:
            smollm2_vocabulary.piece(i).decode("utf-8")
        except UnicodeDecodeError:
            broken += 1
    assert broken == 313


def test_smollm2_ids_equal_llama_cpps(smollm2_vocabulary: Vocabulary) -> None:
    tokenizer = Tokenizer(smollm2_vocabulary)
    cases = json.loads((DATA / "smollm2" / "tokenizer.json").read_text())["cases"]
    assert {c["parse_special"] for c in cases} == {True, False}
    wrong = [c for c in cases if tokenizer.encode(c["text"], special=c["parse_special"]) != _reference(c)]
    assert wrong == []
    for case in cases:
        assert tokenizer.decode_bytes(_reference(case), special=True) == case["text"].encode("utf-8")


def test_others_run_while_a_long_text_is_tokenised(llama: Tokenizer) -> None:
    """The broker answers health in the same process. Counted are wake-ups of this thread, not times: with the interpreter's lock
    held for the whole text there is none."""
    begun, done = threading.Event(), threading.Event()

    def encode() -> None:
        begun.set()
        llama.encode("the quick brown fox " * 50_000, special=False)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    wakes = 0
    while not done.wait(0.001):
        wakes += 1
    thread.join()
    assert wakes >= 20


@pytest.mark.parametrize("special", [False, True])
def test_ids_of_labels_are_those_of_any_text(vocabulary_of, special: bool) -> None:
    """The first time, when they are remembered, and where the text is too long for that; what cannot be encoded never is."""
    tokenizer = Tokenizer(vocabulary_of("qwen35-tiny"))
    for text in (" yes", "<|im_end|>", "no, " * 30):
        twice = [list(tokenizer.label_ids(text, special=special)) for _ in range(2)]
        assert twice == [tokenizer.encode(text, special=special)] * 2
    for _ in range(2):
        with pytest.raises(BadRequest) as caught:
            tokenizer.label_ids("a\ud800", special=special)
        assert caught.value.path is None, "the error is another one each time: what a caller adds to it stays its own"
        caught.value.path = "labels[3]"

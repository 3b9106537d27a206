"""Property: a vocabulary is read as the file states it or refused with the key that is wrong; a token's bytes are exact.

Tolerance: none. The byte alphabet is checked against the `tokenizers` library's own list of its characters.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from geist_pool.errors import GeistPoolError, ModelError, Unsupported
from geist_pool.text.vocabulary import BYTE_OF_CHAR, Vocabulary

VocabularyOf = Callable[[str], Vocabulary]
MetadataOf = Callable[[str], dict[str, object]]


def test_byte_alphabet_has_every_byte_once() -> None:
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))
    assert set(BYTE_OF_CHAR) == set(ByteLevel.alphabet())
    assert BYTE_OF_CHAR["Ġ"] == 0x20 and BYTE_OF_CHAR["Ċ"] == 0x0A and BYTE_OF_CHAR["A"] == 0x41


def test_fields_come_from_the_file(metadata_of: MetadataOf) -> None:
    data = metadata_of("llama-tiny")
    v = Vocabulary.from_metadata(data.get)
    assert (v.model, v.pre, len(v.tokens), len(v.types), len(v.merges)) == ("gpt2", "llama-bpe", 512, 512, 241)
    assert (v.bos, v.eos, v.eot, v.add_bos, v.add_eos, v.chat_template) == (497, 498, None, True, False, None)
    assert v.tokens[497:500] == ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
    assert v.end_ids() == {498, 499}
    assert Vocabulary.from_metadata(metadata_of("qwen3-tiny").get).chat_template is not None


def _changed(data: dict[str, object], **changes: object) -> Callable[[str], object]:
    data = dict(data)
    for name, value in changes.items():
        data["tokenizer.ggml." + name] = value
    return data.get


def test_bos_by_default_for_llama_only(metadata_of: MetadataOf) -> None:
    llama, qwen = metadata_of("llama-tiny"), metadata_of("qwen3-tiny")
    assert Vocabulary.from_metadata(_changed(llama, add_bos_token=None)).add_bos
    assert not Vocabulary.from_metadata(_changed(llama, add_bos_token=None, bos_token_id=None)).add_bos
    assert not Vocabulary.from_metadata(_changed(qwen, add_bos_token=None, bos_token_id=3)).add_bos


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("model", "bert", Unsupported, "'bert' is not supported"),
        ("model", None, ModelError, "missing"),
        ("pre", "tekken", Unsupported, "'tekken' is not supported; supported are smollm"),
        ("pre", b"\xff", ModelError, "not UTF-8"),
        ("tokens", None, ModelError, "missing"),
        ("tokens", [b"a", b"\xc3("], ModelError, r"tokens\[1\] is not UTF-8"),
        ("tokens", [b"a", 3], ModelError, r"tokens\[1\] is not a string"),
        ("tokens", [b"a"], ModelError, "512 entries for 1 tokens"),
        ("token_type", [7] * 512, ModelError, r"token_type\[0\] is 7"),
        ("token_type", [6] * 512, ModelError, "token 0 is a byte token"),
        ("merges", None, ModelError, "missing"),
        ("eos_token_id", 512, ModelError, "512, outside the vocabulary of 512"),
        ("eos_token_id", -1, ModelError, "outside"),
        ("eos_token_id", True, ModelError, "outside"),
        ("bos_token_id", None, ModelError, "names no BOS"),
        ("add_bos_token", 1, ModelError, "not a boolean"),
        ("add_eos_token", True, Unsupported, "EOS behind every text"),
    ],
)
def test_refusals_name_the_key(metadata_of: MetadataOf, key: str, value: object, error: type[GeistPoolError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        Vocabulary.from_metadata(_changed(metadata_of("llama-tiny"), **{key: value}))
    assert caught.value.path is not None
    assert caught.value.path.startswith("tokenizer.ggml.")


def test_pieces_by_kind() -> None:
    v = Vocabulary(
        model="gpt2",
        pre="gpt2",
        tokens=("Ġhi", "<|im_end|>", "<think>", "[PAD3]", "<0x0A>", "ðŁĺ", "plain text", "<unk>", "</s>"),
        types=(1, 3, 4, 5, 6, 1, 1, 2, 1),
        merges=(),
    )
    pieces = [v.piece(i) for i in range(9)]
    assert pieces == [b" hi", b"<|im_end|>", b"<think>", b"", b"\n", b"\xf0\x9f\x98", b"plain text", b"<unk>", b"</s>"]
    assert [v.is_control(i) for i in range(9)] == [False, True, False, False, False, False, False, True, False]
    assert v.end_ids() == {1}  # "</s>" is an ordinary token here: text, not an end
    for outside in (9, -1):
        with pytest.raises(IndexError):
            v.piece(outside)

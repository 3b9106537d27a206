"""What a model file is, in words, for `geist-pool info`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

from geist_pool.engine import Engine, Gguf, ModelInfo, model_info
from geist_pool.errors import GeistPoolError
from geist_pool.text.tokenizer import Tokenizer
from geist_pool.text.vocabulary import Vocabulary

CONTEXT_TOKENS: Final = 700  # of the example: a character sheet, a situation, some turns


def describe(path: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """Facts about the file as (name, value), and the reasons why it cannot be served; none if it can.

    Raises ModelError for a file that is no GGUF at all.
    """
    reasons: list[str] = []
    with Engine("scalar", 1) as engine, Gguf(engine, path) as gguf:
        facts = [("file", f"{path}, {path.stat().st_size:,} bytes")]
        facts += [("name", str(name))] if (name := gguf.get("general.name")) else []
        facts.append(("architecture", str(gguf.get("general.architecture") or "not stated")))
        kinds = Counter(t.type for t in gguf.tensors())
        facts.append(("tensors", ", ".join(f"{kind} x {n}" for kind, n in kinds.most_common())))
        try:
            facts += _sizes(model_info(gguf))
        except GeistPoolError as e:
            reasons.append(str(e))
        try:
            vocabulary = Vocabulary.from_metadata(gguf.get)
            kind = "SentencePiece" if vocabulary.model == "llama" else f"{vocabulary.model}, pre-tokenizer {vocabulary.pre}"
            tokenizer = f"{kind}, {len(vocabulary.tokens):,} tokens"
            facts.append(("vocabulary", tokenizer))
            facts.append(("chat template", "yes" if vocabulary.chat_template is not None else "no"))
            Tokenizer(vocabulary)
        except GeistPoolError as e:
            reasons.append(str(e))
    facts.append(("supported", "yes" if not reasons else "no"))
    return facts, reasons


def _sizes(info: ModelInfo) -> list[tuple[str, str]]:
    whole = info.recurrent_bytes + CONTEXT_TOKENS * info.kv_bytes_per_token
    layers = f"{info.n_layers}: {info.n_attention_layers} with attention, {info.n_recurrent_layers} recurrent"
    return [
        ("layers", layers),
        ("heads", f"{info.n_heads} of {info.head_dim}, {info.n_kv_heads} for keys and values"),
        ("width", f"{info.n_embd}, feed-forward {info.n_ff}"),
        ("parameters", f"{info.n_params:,}"),
        ("trained for", f"{info.n_ctx_train:,} positions"),
        ("packed weights", f"{info.packed_bytes:,} bytes, shared by all workers"),
        ("state", f"{info.recurrent_bytes:,} bytes fixed and {info.kv_bytes_per_token:,} per token (f16)"),
        (f"{CONTEXT_TOKENS} tokens", f"{whole:,} bytes of state"),
    ]

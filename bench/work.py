"""What a piece of work stands for, counted from the model's own tables: multiply-adds of a pass."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from geist_pool.engine import ModelInfo, TensorInfo


def pass_macs(info: ModelInfo, tensors: Sequence[TensorInfo], n_tokens: int, *, before: int = 0) -> int:
    """Multiply-adds of one pass over `n_tokens` positions behind `before` others, with logits of the last.

    Every matrix of the layers counts once per token (a convolution's too), the output matrix once a pass, attention twice per
    head dimension and visible position, a delta-rule state three times per element and token (it is read by the key, updated,
    read by the query). Norms, activations and softmax are left out: they are no multiply-adds to speak of.
    """
    per_token = sum(math.prod(t.dims) for t in tensors if _is_layer_matrix(t, info.n_layers))
    visible = sum(range(before + 1, before + n_tokens + 1))
    attention = 2 * info.n_attention_layers * info.n_heads * info.head_dim * visible
    delta = 3 * info.recurrent_bytes // 4 * n_tokens
    return per_token * n_tokens + info.n_embd * info.n_vocab + attention + delta


def _is_layer_matrix(tensor: TensorInfo, n_layers: int) -> bool:
    """Whether it is a matrix of a layer that is computed; blocks behind those predict further tokens and are skipped."""
    layer = re.match(r"blk\.(\d+)\.", tensor.name)
    return layer is not None and int(layer[1]) < n_layers and sum(d > 1 for d in tensor.dims) >= 2

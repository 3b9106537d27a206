#!/usr/bin/env python3
"""Writes quant_vectors.h: random blocks and the values that the `gguf` package gives for them.

    python make_quant_vectors.py > quant_vectors.h

Scales are drawn from the whole range of finite f16, subnormals and both signs included. Values are stored as
float bits.
"""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

BLOCKS = 4
K_BLOCKS = 2


def block(rng: np.random.Generator, kind: GGMLQuantizationType) -> np.ndarray:
    def half() -> np.ndarray:
        return np.frombuffer(np.float16(rng.uniform(-1, 1) * 2.0 ** int(rng.integers(-24, 14))).tobytes(), np.uint8)

    def others(n: int) -> np.ndarray:
        return rng.integers(0, 256, n, dtype=np.uint8)

    header = {"Q8_0": 1, "Q4_0": 1, "Q4_1": 2, "Q5_0": 1, "Q5_1": 2, "Q4_K": 2, "Q5_K": 2}.get(kind.name, 0)
    size = GGML_QUANT_SIZES[kind][1] - 2 * header
    if header:
        return np.concatenate([half() for _ in range(header)] + [others(size)])
    if kind.name == "Q6_K":
        return np.concatenate([others(208), half()])
    if kind.name == "F16":
        return np.concatenate([half() for _ in range(32)])
    return np.frombuffer(
        (rng.standard_normal(32).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes(),
        np.uint8,
    )


def rows(values: np.ndarray, form: str, per_line: int) -> str:
    text = [format(int(v), form) for v in values]
    return ",\n".join("    " + ", ".join(text[i : i + per_line]) for i in range(0, len(text), per_line))


def main() -> None:
    rng = np.random.default_rng(20260211)
    print("/* quant_vectors.h - written by make_quant_vectors.py; values by the gguf package. */")
    print("#ifndef GEIST_QUANT_VECTORS_H\n#define GEIST_QUANT_VECTORS_H\n\n#include <stdint.h>\n")
    print("/* clang-format off */")
    for name in ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"):
        kind = GGMLQuantizationType[name]
        raw = np.concatenate([block(rng, kind) for _ in range(K_BLOCKS if name.endswith("_K") else BLOCKS)])
        if name == "Q8_0":
            raw[2] = 0x80  # -128, which quantisers rarely write
        values = dequantize(raw, kind).astype(np.float32).reshape(-1).view(np.uint32)
        print(f"static const uint8_t {name.lower()}_bytes[{len(raw)}] = {{\n{rows(raw, '#04x', 20)}}};")
        print(f"static const uint32_t {name.lower()}_values[{len(values)}] = {{\n{rows(values, '#010x', 10)}}};")
    print("/* clang-format on */\n\n#endif")


if __name__ == "__main__":
    main()

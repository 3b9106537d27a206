#!/usr/bin/env python3
"""Writes tests/data/oracle/states/NAME.bin from refs/NAME.npz, for native tests, which read no npz.

A file is records one behind the other: name, 24 bytes padded with zeros; uint32 count; count 4-byte values (int32 for tokens,
float32 else), little-endian. Arrays: tokens_17, hidden_17, k_17_Li, v_17_Li, rec_17_Li, conv_17_Li as SOURCES.md describes them.

    python make_states.py [tests/data/oracle]
"""

import struct
import sys
from pathlib import Path

import numpy as np

PREFIXES = ("tokens_17", "hidden_17", "k_17_", "v_17_", "rec_17_", "conv_17_")


def main() -> None:
    oracle = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent / "data" / "oracle")
    (oracle / "states").mkdir(exist_ok=True)
    for npz in sorted((oracle / "refs").glob("*-f32.npz")):
        with np.load(npz) as refs, (oracle / "states" / f"{npz.stem}.bin").open("wb") as out:
            for name in sorted(refs.files):
                if name.startswith(PREFIXES):
                    a = refs[name]
                    a = a.astype("<i4" if name.startswith("tokens") else "<f4")
                    out.write(struct.pack("<24sI", name.encode(), a.size) + a.tobytes())


if __name__ == "__main__":
    main()

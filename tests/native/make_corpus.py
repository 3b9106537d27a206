#!/usr/bin/env python3
"""Writes corpus/gguf/ and corpus/restore/: small starting points for the fuzz targets.

    python make_corpus.py MODELS_DIRECTORY CORPUS_DIRECTORY

From each fixture: `NAME-head` is header, metadata and tensor table as they are, with 64 bytes of data
behind (refused for missing data: the parser's refusals are near). From some, `NAME-small`: the fixture's
hyperparameters and tensors without vocabulary, with an embedding of a few rows and quantised data of zeros
(it compresses to nothing), so that it loads and mutants of it reach the model.
"""

import struct
import sys
from pathlib import Path

STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
BLOCKS = {0: (1, 4), 8: (32, 34), 12: (256, 144), 14: (256, 210)}  # F32, Q8_0, Q4_K, Q6_K: all that the fixtures hold


def parse(b: bytes) -> tuple[list[tuple[str, bytes]], list[tuple[str, list[int], int, int]], int, int]:
    """Keys with raw type and value, tensors (name, dims, type, offset), table end, data begin."""
    at = 8

    def take(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(form, b, at)
        at += struct.calcsize(form)
        return int(value)

    def text() -> str:
        nonlocal at
        n = take("<Q")
        at += n
        return b[at - n : at].decode()

    n_tensors, n_keys = take("<Q"), take("<Q")
    keys = []
    for _ in range(n_keys):
        key, begin = text(), at
        kind, count = take("<I"), 1
        if kind == ARRAY:
            kind, count = take("<I"), take("<Q")
        if kind == STRING:
            for _ in range(count):
                text()
        else:
            at += SIZES[kind] * count
        keys.append((key, b[begin:at]))
    tensors = []
    for _ in range(n_tensors):
        name = text()
        dims = [take("<Q") for _ in range(take("<I"))]
        tensors.append((name, dims, take("<I"), take("<Q")))
    return keys, tensors, at, -(-at // 32) * 32


def small(b: bytes, rows: int = 4) -> bytes:
    """The file without vocabulary and with `rows` rows of embedding, quantised data zero."""
    keys, tensors, _, data = parse(b)
    keys = [(k, v) for k, v in keys if not k.startswith("tokenizer.") and not k.endswith(".vocab_size")]
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for key, value in keys:
        out += struct.pack("<Q", len(key)) + key.encode() + value
    table, body = b"", b""
    for name, dims, kind, offset in tensors:
        if name in ("token_embd.weight", "output.weight"):
            dims = [dims[0], rows]
        n = 1
        for d in dims:
            n *= d
        values, size = BLOCKS[kind]
        table += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
        table += b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", kind, len(body))
        size *= n // values
        body += b[data + offset : data + offset + size] if kind == 0 else bytes(size)
        body += bytes(-len(body) % 32)
    out += table
    return out + bytes(-len(out) % 32) + body


def edit(flags: int, cut: int = 0, *places: tuple[int, int, int]) -> bytes:
    """An input of fuzz_restore: flags, a cut, and edits (offset, byte, 1 for anywhere or 0 for the header) of a sound image."""
    out = bytes([flags]) + cut.to_bytes(3, "big")
    for offset, byte, anywhere in places:
        out += offset.to_bytes(3, "big") + bytes([byte, anywhere])
    return out + b"."


SMALL = ("llama-tiny-q8_0", "llama3rope-tiny-q8_0", "qwen3-tiny-q8_0", "qwen35-tiny-mtp-q8_0", "gemma3-tiny-q8_0")
RESTORES = {
    "sound": edit(0),
    "sound-with-areas": edit(8),
    "cut": edit(1, 5000),
    "state-flipped": edit(0, 0, (9000, 255, 1)),
    "header-flipped": edit(0, 0, (100, 255, 0)),
    "header-mended": edit(2, 0, (112, 200, 0)),
    "planned-anew": edit(6, 0, (112, 200, 0), (80, 0, 0)),
}


def main() -> None:
    models, corpus = Path(sys.argv[1]), Path(sys.argv[2])
    for room in ("gguf", "restore"):
        (corpus / room).mkdir(parents=True, exist_ok=True)
    for name, data in RESTORES.items():
        (corpus / "restore" / name).write_bytes(data)
    for path in sorted(models.glob("*/*.gguf")):
        b = path.read_bytes()
        (corpus / "gguf" / f"{path.stem}-head").write_bytes(b[: parse(b)[3] + 64])
        if path.stem in SMALL:
            (corpus / "gguf" / f"{path.stem}-small").write_bytes(small(b))


if __name__ == "__main__":
    main()

"""Finding contexts by what they hold. Pure.

A recurrent state cannot be cut back, so only a context whose tokens are, to the last one, a prefix of the prompt is of any use:
candidates are looked up by hash at the lengths that exist, and equality of the ids decides (a dict does both).
"""

from __future__ import annotations

import bisect
from array import array
from collections import Counter
from collections.abc import Sequence

ID_BYTES = array("I").itemsize


def pack_ids(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes, ID_BYTES each; equal sequences give equal bytes, prefixes prefixes."""
    return array("I", tokens).tobytes()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    ids = array("I")
    ids.frombytes(packed)
    return tuple(ids)


def common_ids(left: bytes, right: bytes) -> int:
    """How many ids two packed sequences have in common at their start."""
    low, high = 0, min(len(left), len(right)) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if left[low * ID_BYTES : middle * ID_BYTES] == right[low * ID_BYTES : middle * ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


class ContentIndex:
    """The findable contexts of one space, by packed token ids."""

    def __init__(self) -> None:
        self._keys: dict[bytes, str] = {}
        self._lengths: Counter[int] = Counter()  # in bytes
        self._longest_first: list[int] = []
        self._sorted: list[bytes] = []

    def __len__(self) -> int:
        return len(self._keys)

    def items(self) -> list[tuple[bytes, str]]:
        return list(self._keys.items())

    def add(self, tokens: bytes, key: str) -> None:
        """ValueError if these tokens are there already."""
        if tokens in self._keys:
            raise ValueError("the same tokens twice in one space")
        self._keys[tokens] = key
        bisect.insort(self._sorted, tokens)
        self._lengths[len(tokens)] += 1
        if self._lengths[len(tokens)] == 1:
            self._longest_first = sorted(self._lengths, reverse=True)

    def remove(self, tokens: bytes) -> None:
        del self._keys[tokens]
        del self._sorted[bisect.bisect_left(self._sorted, tokens)]
        self._lengths[len(tokens)] -= 1
        if self._lengths[len(tokens)] == 0:
            del self._lengths[len(tokens)]
            self._longest_first.remove(len(tokens))

    def exact(self, tokens: bytes) -> str | None:
        """The context that holds exactly these tokens."""
        return self._keys.get(tokens)

    def longest_prefix(self, tokens: bytes) -> str | None:
        """The longest context whose tokens are a prefix of these (or all of them)."""
        for n in self._longest_first:
            if n <= len(tokens) and (key := self._keys.get(tokens[:n])) is not None:
                return key
        return None

    def nearest(self, tokens: bytes) -> tuple[str, int] | None:
        """The context with the longest common beginning, and the first position at which it differs from these tokens.

        In sorted order the longest common beginning is next to where the tokens themselves would stand.
        """
        at = bisect.bisect_left(self._sorted, tokens)
        best: tuple[str, int] | None = None
        for neighbour in self._sorted[max(0, at - 1) : at + 1]:
            n = common_ids(neighbour, tokens)
            if best is None or n > best[1]:
                best = (self._keys[neighbour], n)
        return best

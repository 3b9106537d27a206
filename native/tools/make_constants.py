#!/usr/bin/env python3
"""Prints the constants of native/src/base/math.c and sha256.c, from integer arithmetic alone.

    python make_constants.py

pi by Machin's formula, ln 2 by its atanh series, roots by math.isqrt and an integer cube root.
"""

import math

BITS = 400  # fixed point


def arctan_inverse(n: int) -> int:
    """arctan(1/n) * 2^BITS."""
    term = (1 << BITS) // n
    total, k, sign = 0, 1, 1
    while term:
        total += sign * (term // k)
        term //= n * n
        k, sign = k + 2, -sign
    return total


def pi() -> int:
    return 4 * (4 * arctan_inverse(5) - arctan_inverse(239))


def ln2() -> int:
    """2 atanh(1/3) * 2^BITS."""
    term, total, k = (1 << BITS) // 3, 0, 1
    while term:
        total += term // k
        term //= 9
        k += 2
    return 2 * total


def hex_float(mantissa: int, exponent: int) -> str:
    return float.hex(math.ldexp(mantissa, exponent))


def pieces(value: int, bits: int, count: int) -> list[str]:
    """`value` * 2^-BITS as a sum of numbers of at most `bits` bits, cut off at fixed places."""
    out, scale = [], value.bit_length() - bits
    for _ in range(count):
        part = value >> scale
        out.append(hex_float(part, scale - BITS))
        value -= part << scale
        scale -= bits
    return out


def rounded(value: int, bits: int = 53) -> str:
    scale = value.bit_length() - bits
    return hex_float((value + (1 << (scale - 1))) >> scale, scale - BITS)


def cube_root(n: int) -> int:
    lo, hi = 0, 1 << (n.bit_length() // 3 + 2)
    while hi - lo > 1:
        mid = (lo + hi) // 2
        lo, hi = (mid, hi) if mid**3 <= n else (lo, mid)
    return lo


def primes(n: int) -> list[int]:
    found: list[int] = []
    k = 2
    while len(found) < n:
        if all(k % p for p in found):
            found.append(k)
        k += 1
    return found


def main() -> None:
    print("pi/2, pieces of 23 bits:", ", ".join(pieces(pi() // 2, 23, 7)))
    print("2/pi:", rounded((1 << (2 * BITS)) // (pi() // 2)))
    high = pieces(ln2(), 32, 1)[0]
    low = ln2() - int(float.fromhex(high) * 2.0**64) * (1 << (BITS - 64))
    print("ln 2: high", high, "low", rounded(low))
    print("1/ln 2:", rounded((1 << (2 * BITS)) // ln2()))
    fractions = [cube_root(p << 96) & 0xFFFFFFFF for p in primes(64)]
    for i in range(0, 64, 8):
        print("    " + ", ".join(f"0x{k:08x}" for k in fractions[i : i + 8]) + ",")
    print(", ".join(f"0x{math.isqrt(p << 64) & 0xFFFFFFFF:08x}" for p in primes(8)))


if __name__ == "__main__":
    main()

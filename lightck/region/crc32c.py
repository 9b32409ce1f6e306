"""Compute the CRC32C of concatenated bytes from the checksums of their parts."""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0x82F63B78
"""The Castagnoli polynomial, bits reversed: the highest bit stands for x^0."""
_ONE = 1 << 31


def combine(crc_a: int, crc_b: int, length_b: int) -> int:
    """Return the CRC32C of a followed by b."""
    return _times(_power(8 * length_b), crc_a) ^ crc_b


def _times(a: int, b: int) -> int:
    """Return the product modulo the polynomial."""
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


def _power(n: int) -> int:
    """Return x^n modulo the polynomial."""
    result, k = _ONE, 0
    while n:
        if n & 1:
            result = _times(_squared(k), result)
        n, k = n >> 1, k + 1
    return result


@cache
def _squared(k: int) -> int:
    """Return x^(2^k) modulo the polynomial."""
    if k == 0:
        return _ONE >> 1
    return _times(_squared(k - 1), _squared(k - 1))

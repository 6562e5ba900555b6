"""Attention with linear biases (ALiBi, arXiv 2108.12409)."""

from __future__ import annotations

import math


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """How fast each head forgets with distance: 2^(-8/n), its square, and so on for n heads, n a
    power of two. Other numbers of heads take the odd powers of twice as many for what is left.
    """
    whole = 2 ** math.floor(math.log2(heads))
    powers = lambda n, count, every: [2 ** (-8 / n * (every * i + 1)) for i in range(count)]
    return tuple(powers(whole, whole, 1) + powers(2 * whole, heads - whole, 2))


def mpt_slopes(heads: int) -> tuple[float, ...]:
    """2^(-8/n) and so on for the next power of two, n; other numbers of heads take every second
    one of them first, then as many of the others as are needed (MPT).
    """
    whole = 2 ** math.ceil(math.log2(heads))
    powers = [2 ** (-8 / whole * (i + 1)) for i in range(whole)]
    return tuple(powers if whole == heads else (powers[1::2] + powers[::2])[:heads])

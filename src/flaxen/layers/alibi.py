"""Attention with linear biases (ALiBi, arXiv 2108.12409)."""

from __future__ import annotations

import math


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """How fast each head forgets with distance: 2^(-8/n), its square, and so on for n heads, a power
    of two. Other numbers of heads take the odd powers of twice as many for what is left.
    """
    whole = 2 ** math.floor(math.log2(heads))
    powers = lambda n, count, every: [2 ** (-8 / n * (every * i + 1)) for i in range(count)]
    return tuple(powers(whole, whole, 1) + powers(2 * whole, heads - whole, 2))

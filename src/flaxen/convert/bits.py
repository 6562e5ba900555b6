"""Numbers of a few bits in a stream of words, the first in the lowest bits of the first word."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def unpack(words: Any, bits: int, xp: Any = np) -> Any:
    """(..., n * bits / width) unsigned words -> (..., n) numbers of `bits`, in the words' dtype.

    A number may begin in one word and end in the next. xp: numpy or jax.numpy.
    """
    at, shift, period, width = _stream(bits, words.dtype)
    groups = words.reshape(*words.shape[:-1], -1, period)
    found = (groups if period == 1 else groups[..., at]) >> shift
    crossing = shift + bits > width
    if crossing.any():
        rest = groups[..., np.minimum(at + 1, period - 1)] << (width - shift) % width
        found = xp.where(crossing, found | rest, found)
    numbers = found & words.dtype.type(2**bits - 1)
    return numbers.reshape(*words.shape[:-1], -1)


def pack(numbers: np.ndarray, bits: int, word: Any = np.uint8) -> np.ndarray:
    """The inverse of `unpack`: (..., n) -> (..., n * bits / width); n fills whole words."""
    at, shift, period, width = _stream(bits, np.dtype(word))
    groups = numbers.astype(word).reshape(*numbers.shape[:-1], -1, len(at))
    words = np.zeros((*groups.shape[:-1], period), word)
    for i, (word_at, low) in enumerate(zip(at, shift, strict=True)):
        words[..., word_at] |= groups[..., i] << low
        if low + bits > width:
            words[..., word_at + 1] |= groups[..., i] >> (width - low)
    return words.reshape(*numbers.shape[:-1], -1)


def _stream(bits: int, word: np.dtype) -> tuple[np.ndarray, np.ndarray, int, int]:
    """One period of the stream: each number's word and its shift there; words; bits of a word."""
    width = word.itemsize * 8
    starts = np.arange(0, math.lcm(bits, width), bits)
    shift = (starts % width).astype(word)
    return starts // width, shift, math.lcm(bits, width) // width, width

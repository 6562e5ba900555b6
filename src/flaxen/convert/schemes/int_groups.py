"""Integers of a few bits with a scale and a zero for each group of inputs.

Sources: AWQ, https://arxiv.org/abs/2306.00978; GPTQ, https://arxiv.org/abs/2210.17323; the order
of bits is that of the files that their reference programs write.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from flaxen.convert.bits import unpack
from flaxen.convert.lazy import Box, whole
from flaxen.convert.schemes.base import Parts, aligned, blocks, spread

WORD = 32

AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32)
"""Which nibble of a word holds each of its eight outputs."""


@dataclasses.dataclass(frozen=True)
class Awq:
    """(q - zero) * scale of four-bit numbers, eight outputs in a word.

    qweight: [in, out / 8] int32; qzeros: [in / group, out / 8] int32; scales: [in / group, out].
    """

    group: int
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qweight": ("in", "out"),
        "qzeros": ("in", "out"),
        "scales": ("in", "out"),
    }

    def cover(self, box: Box) -> Box:
        return (aligned(box[0], 8), box[1])

    def boxes(self, box: Box, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Box]:
        outs, ins = box
        groups, words = blocks(ins, self.group), blocks(outs, 8)
        return {"qweight": (ins, words), "qzeros": (groups, words), "scales": (groups, outs)}

    def values(self, parts: Parts, xp: Any = np, start: tuple[int, ...] = ()) -> Any:
        codes = self._numbers(parts["qweight"], xp)
        zeros, scales = self._numbers(parts["qzeros"], xp), parts["scales"].T
        return _grouped(codes, zeros, scales, self.group, start[-1] if start else 0, xp)

    def _numbers(self, words: Any, xp: Any) -> Any:
        """[n, out / 8] words -> [out, n] numbers."""
        shifts = xp.asarray(AWQ_PLACES * 4)[:, None]
        numbers = words.T[:, None, :].view(xp.uint32) >> shifts & 15
        return numbers.astype(xp.int8).reshape(-1, len(words))


@dataclasses.dataclass(frozen=True)
class Gptq:
    """(q - zero) * scale of numbers of 2, 3, 4 or 8 bits in streams of words.

    qweight: [in * bits / 32, out] int32; qzeros: [groups, out * bits / 32] int32, each zero stored
    less `less` (1 in the format's first version); scales: [groups, out]; g_idx: [in] int32, the
    group of each input where `by_index`, else input i is of group i // group.
    """

    bits: int
    group: int
    less: int = 1
    by_index: bool = False
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qweight": ("in", "out"),
        "qzeros": ("in", "out"),
        "scales": ("in", "out"),
        "g_idx": ("in",),
    }

    @property
    def period(self) -> int:
        """How many numbers fill whole words."""
        return math.lcm(self.bits, WORD) // self.bits

    def cover(self, box: Box) -> Box:
        return (aligned(box[0], self.period), aligned(box[1], self.period))

    def boxes(self, box: Box, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Box]:
        outs, ins = box
        outs_words, ins_words = (
            slice(part.start * self.bits // WORD, part.stop * self.bits // WORD) for part in box
        )
        groups = whole(shapes["scales"])[0] if self.by_index else blocks(ins, self.group)
        index: dict[str, Box] = {"g_idx": (ins,)} if self.by_index else {}
        return index | {
            "qweight": (ins_words, outs),
            "qzeros": (groups, outs_words),
            "scales": (groups, outs),
        }

    def values(self, parts: Parts, xp: Any = np, start: tuple[int, ...] = ()) -> Any:
        kind = xp.int16 if self.bits == 8 else xp.int8
        codes = unpack(parts["qweight"].T.copy().view(xp.uint8), self.bits, xp).astype(kind)
        stored = unpack(parts["qzeros"].view(xp.uint8), self.bits, xp).T.astype(kind)
        # A zero of 0 is stored as all ones.
        zeros, scales = (stored + self.less) & (2**self.bits - 1), parts["scales"].T
        if self.by_index:
            return _values(codes, zeros[:, parts["g_idx"]], scales[:, parts["g_idx"]], xp)
        return _grouped(codes, zeros, scales, self.group, start[-1] if start else 0, xp)


def _grouped(codes: Any, zeros: Any, scales: Any, size: int, start: int, xp: Any) -> Any:
    """Values [out, in] from zeros and scales [out, groups]; the first input is number `start`."""
    ins = codes.shape[1]
    if start % size == 0 and ins % size == 0:
        groups = codes.reshape(len(codes), -1, size)
        return _values(groups, zeros[..., None], scales[..., None], xp).reshape(codes.shape)
    zeros, scales = (spread(x, size, 1, start, ins, xp) for x in (zeros, scales))
    return _values(codes, zeros, scales, xp)


def _values(codes: Any, zeros: Any, scales: Any, xp: Any) -> Any:
    return (codes - zeros).astype(xp.float32) * scales.astype(xp.float32)

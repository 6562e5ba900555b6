"""Float8 weights with one scale for each block of a matrix.

Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3.2; scales of kind E8M0: OCP
Microscaling Formats 1.0, section 5.4.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from flaxen.convert.lazy import Box, whole
from flaxen.convert.schemes.base import POWERS, Parts, blocks, spread


@dataclasses.dataclass(frozen=True)
class Fp8Blocks:
    """weight [..., out, in] in float8, times weight_scale_inv [..., out / rows, in / columns].

    The last blocks may be partial. A scale of fewer axes than the weight is one for all of it.
    """

    block: tuple[int, int]
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight": ("out", "in"),
        "weight_scale_inv": ("out", "in"),
    }

    def cover(self, box: Box) -> Box:
        return box

    def boxes(self, box: Box, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Box]:
        grid = shapes["weight_scale_inv"]
        met = (blocks(part, size) for part, size in zip(box[-2:], self.block, strict=True))
        scales = (*box[:-2], *met) if len(grid) == len(box) else whole(grid)
        return {"weight": box, "weight_scale_inv": scales}

    def values(self, parts: Parts, xp: Any = np, start: tuple[int, ...] = ()) -> Any:
        codes, scales = parts["weight"], factors(parts["weight_scale_inv"], xp)
        if scales.ndim < codes.ndim:
            return codes.astype(xp.float32) * scales.reshape((1,) * codes.ndim)
        for axis, size, at in zip((-2, -1), self.block, start[-2:] or (0, 0), strict=True):
            scales = spread(scales, size, axis, at, codes.shape[axis], xp)
        return codes.astype(xp.float32) * scales


def factors(scales: Any, xp: Any = np) -> Any:
    """Scales in float32; bytes are exponents."""
    if scales.dtype == np.uint8:
        return xp.asarray(POWERS)[scales]
    return scales.astype(xp.float32)

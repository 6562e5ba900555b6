"""MXFP4: blocks of 32 four-bit floats, each block with a power of two.

Source: OCP Microscaling Formats 1.0, sections 5.3.3 (E2M1) and 5.4.1 (E8M0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from flaxen.convert.bits import unpack
from flaxen.convert.lazy import Box
from flaxen.convert.schemes.base import POWERS, Parts, aligned, blocks

BLOCK = 32

_CODES = unpack(np.arange(256, dtype=np.uint8)[:, None], 4)
PAIRS = _CODES.view(ml_dtypes.float4_e2m1fn).astype(np.float32).view(np.uint64)[:, 0]
"""The two values in each byte, the low half's first, as one number that is quick to look up."""


@dataclasses.dataclass(frozen=True)
class Mxfp4Experts:
    """Experts' weights [experts, in, out], stored transposed.

    blocks: [experts, out, in / 32, 16] bytes; scales: [experts, out, in / 32] exponents. Only
    NumPy works them out: experts do not stay packed in memory.
    """

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "blocks": ("experts", "out", "in", ""),
        "scales": ("experts", "out", "in"),
    }

    def cover(self, box: Box) -> Box:
        return (box[0], aligned(box[1], BLOCK), box[2])

    def boxes(self, box: Box, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Box]:
        experts, ins, outs = box
        met = (experts, outs, blocks(ins, BLOCK))
        return {"blocks": (*met, slice(0, BLOCK // 2)), "scales": met}

    def values(self, parts: Parts, xp: Any = np, start: tuple[int, ...] = ()) -> Any:
        experts, outs, groups, _ = parts["blocks"].shape
        values = PAIRS[parts["blocks"]].view(np.float32)
        values *= POWERS[parts["scales"]][..., None]
        return values.reshape(experts, outs, groups * BLOCK).swapaxes(1, 2)

"""Codes and scales of a matrix that is rounded while it is read."""

from __future__ import annotations

import numpy as np

from flaxen.convert.lazy import Box, LazyTensor, shifted
from flaxen.convert.schemes.base import aligned
from flaxen.convert.views import slabs
from flaxen.quantize.rounding import Rounding

CHUNK = 8 << 20
"""Bytes of float32 values that are looked at at a time, and at least a group of inputs."""


def rounded_parts(source: LazyTensor, rounding: Rounding) -> dict[str, LazyTensor]:
    """The parts of `rounding` for a tensor (..., out, in); nothing is read yet.

    Scales come from whole groups however a mesh cuts the matrix, so codes are the same on each.
    """
    scales = Scales(source, rounding)
    return {"codes": Codes(scales), "scales": scales}


class Scales(LazyTensor):
    """The scales; those that were needed for codes are remembered."""

    dtype = np.dtype(np.float16)

    def __init__(self, source: LazyTensor, rounding: Rounding):
        assert rounding.group is not None
        self.source, self.rounding, self.group = source, rounding, rounding.group
        self.shape = (*source.shape[:-1], source.shape[-1] // self.group)
        self.known = np.zeros(self.shape, np.float16)  # no scale is 0

    def fill(self, box: Box, out: np.ndarray) -> None:
        for part, inside in slabs(box, self.group * 4, CHUNK):
            out[(*inside, ...)] = self.of(part)

    def of(self, part: Box, values: np.ndarray | None = None) -> np.ndarray:
        """The scales of a box of groups, of which these are the values, if they were read."""
        known = self.known[(*part, ...)]
        if not known.all():
            values = self.read_groups(part) if values is None else values
            known[...] = self.rounding.scales(values)
        return known

    def read_groups(self, part: Box) -> np.ndarray:
        ins = slice(part[-1].start * self.group, part[-1].stop * self.group)
        return self.source.read((*part[:-1], ins)).astype(np.float32)


class Codes(LazyTensor):
    """The codes as they are stored."""

    def __init__(self, scales: Scales):
        self.scales, self.rounding, self.dtype = scales, scales.rounding, scales.rounding.code_dtype
        *outer, outs, ins = scales.source.shape
        self.shape = (*outer, outs // self.rounding.outputs, ins)

    def fill(self, box: Box, out: np.ndarray) -> None:
        each = self.rounding.outputs
        for part, inside in slabs(box, each * 4, CHUNK):
            outs = slice(part[-2].start * each, part[-2].stop * each)
            out[(*inside, ...)] = self._packed((*part[:-2], outs, part[-1]))

    def _packed(self, box: Box) -> np.ndarray:
        size = self.scales.group
        cover = aligned(box[-1], size)
        groups = (*box[:-1], slice(cover.start // size, cover.stop // size))
        values = self.scales.read_groups(groups)
        codes = self.rounding.rounded(values, self.scales.of(groups, values))
        return self.rounding.packed(codes[..., shifted(box[-1], -cover.start)])

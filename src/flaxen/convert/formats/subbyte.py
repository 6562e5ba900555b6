"""Safetensors kinds of less than a byte: read as one byte for each value, written packed.

The format gives sizes alone (a shape counts values, a tensor fills whole bytes). Values are a
stream of bits, the first in the lowest bits: two F4 in a byte, low half first, as torch's
`float4_e2m1fn_x2` has them, and four F6 in three bytes.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from flaxen.convert.bits import pack, unpack
from flaxen.convert.lazy import Box, LazyTensor
from flaxen.convert.views import CHUNK, slabs

KINDS: dict[str, np.dtype] = {
    "F4": np.dtype(ml_dtypes.float4_e2m1fn),
    "F6_E2M3": np.dtype(ml_dtypes.float6_e2m3fn),
    "F6_E3M2": np.dtype(ml_dtypes.float6_e3m2fn),
}
BITS = {KINDS["F4"]: 4, KINDS["F6_E2M3"]: 6, KINDS["F6_E3M2"]: 6}
_NAMES = {dtype: kind for kind, dtype in KINDS.items()}


class SubByteTensor(LazyTensor):
    """The values in a flat tensor of bytes; a read takes the bytes that hold its box."""

    def __init__(self, raw: LazyTensor, dtype: np.dtype, shape: tuple[int, ...]):
        self.shape, self.dtype, self.bits = shape, dtype, BITS[dtype]
        # The last axes that together fill whole bytes are one row.
        self.split = next(
            i
            for i in reversed(range(max(1, len(shape))))
            if math.prod(shape[i:]) * self.bits % 8 == 0
        )
        row_bytes = math.prod(shape[self.split :]) * self.bits // 8
        self.raw = raw.reshape((*shape[: self.split], row_bytes))

    def fill(self, box: Box, out: np.ndarray) -> None:
        for part, inside in slabs(box, 1, CHUNK):
            target = out[(*inside, ...)]
            target[...] = self._values(part).reshape(target.shape)

    def _values(self, box: Box) -> np.ndarray:
        outer, inner = box[: self.split], box[self.split :]
        where = _flat(inner, self.shape[self.split :])
        step = 8 // math.gcd(8, self.bits)
        first, last = where[0] // step * step, where[-1] + 1
        held = slice(first * self.bits // 8, -(-last // step) * step * self.bits // 8)
        values = unpack(self.raw.read((*outer, held)), self.bits)
        return values[..., where - first].view(self.dtype)


class SubBytePacked(LazyTensor):
    """The bytes that a tensor of such values is stored in."""

    dtype = np.dtype(np.uint8)

    def __init__(self, values: LazyTensor):
        self.kind, self.stored_shape = _NAMES[values.dtype], values.shape
        self.bits, self.flat = BITS[values.dtype], values.reshape((values.size,))
        self.shape = (values.size * self.bits // 8,)

    def fill(self, box: Box, out: np.ndarray) -> None:
        step = math.lcm(8, self.bits)
        first, last = box[0].start * 8 // step, -(-box[0].stop * 8 // step)
        per = step // self.bits
        values = self.flat.read((slice(first * per, last * per),)).view(np.uint8)
        start = box[0].start - first * step // 8
        out[...] = pack(values & (2**self.bits - 1), self.bits)[start : start + len(out)]


def storable(tensor: LazyTensor) -> LazyTensor:
    """The tensor itself, or its packed bytes where it is of a kind of less than a byte."""
    return SubBytePacked(tensor) if tensor.dtype in BITS else tensor


def _flat(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    """Positions of a box's values in the flat order of a shape."""
    grid = np.zeros((1,) * len(box), np.int64)
    for axis, part in enumerate(box):
        steps = np.arange(part.start, part.stop) * math.prod(shape[axis + 1 :])
        grid = grid + steps.reshape([-1 if i == axis else 1 for i in range(len(box))])
    return grid.reshape(-1)


def kind_and_shape(tensor: LazyTensor, kinds: dict[np.dtype, str]) -> tuple[str, tuple[int, ...]]:
    """What a header says of a tensor that `storable` gave."""
    if isinstance(tensor, SubBytePacked):
        return tensor.kind, tensor.stored_shape
    return kinds[tensor.dtype], tensor.shape

"""A quantised weight as a lazy tensor: a box of it reads the codes and scales of that box alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from flaxen.convert.lazy import Box, LazyTensor, shifted
from flaxen.convert.views import slabs

CHUNK = 2 << 20
"""Bytes of float32 values worked out at a time."""

with np.errstate(over="ignore"):
    POWERS = np.ldexp(np.float32(1), np.arange(256) - 127)
    """What a byte of scale means where scales are exponents (E8M0)."""

Parts = Mapping[str, Any]
"""The stored arrays of a weight, by the last piece of their names: `qweight`, `scales`."""


class Scheme(Protocol):
    """One way of storing a weight [out, in], or several along leading axes; hashable."""

    axes: ClassVar[Mapping[str, tuple[str, ...]]]
    """For each part that values are made of, the axis of the weight that each of its axes follows:
    `out` or `in`.
    """

    def cover(self, box: Box) -> Box:
        """The smallest box around `box` whose parts can be cut out."""
        ...

    def boxes(self, box: Box, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Box]:
        """The boxes of the parts that make such a box, from the shapes of the parts."""
        ...

    def values(self, parts: Parts, xp: Any = np, start: tuple[int, ...] = ()) -> Any:
        """Float32 values of a box that begins at `start` (default: the origin), from its parts.

        xp: numpy or jax.numpy, which the parts are arrays of.
        """
        ...


class QuantizedTensor(LazyTensor):
    """The values of a quantised weight, worked out in float32 and rounded once to `dtype`.

    `parts` are its stored tensors; some may only be kept to be written again.
    """

    def __init__(
        self,
        scheme: Scheme,
        parts: Mapping[str, LazyTensor],
        shape: tuple[int, ...],
        dtype: np.dtype,
    ):
        self.scheme, self.parts = scheme, dict(parts)
        self.shape, self.dtype = shape, dtype

    def fill(self, box: Box, out: np.ndarray) -> None:
        shapes = {role: part.shape for role, part in self.parts.items()}
        for wanted, inside in slabs(box, 4, CHUNK):
            cover = self.scheme.cover(wanted)
            boxes = self.scheme.boxes(cover, shapes)
            parts = {role: self.parts[role].read(where) for role, where in boxes.items()}
            with np.errstate(over="ignore", invalid="ignore"):
                values = self.scheme.values(parts, np, tuple(s.start for s in cover))
                cut = tuple(shifted(w, -c.start) for w, c in zip(wanted, cover, strict=True))
                # Rounded as it lies, then copied: the values may be transposed in memory.
                out[(*inside, ...)] = values[cut].astype(self.dtype)

    def recast(self, dtype: np.dtype) -> LazyTensor | None:
        return QuantizedTensor(self.scheme, self.parts, self.shape, dtype)


def blocks(part: slice, size: int) -> slice:
    """The blocks of `size` that a range meets."""
    return slice(part.start // size, -(-part.stop // size))


def aligned(part: slice, size: int) -> slice:
    """The range widened to whole blocks of `size`."""
    met = blocks(part, size)
    return slice(met.start * size, met.stop * size)


def spread(x: Any, size: int, axis: int, start: int, length: int, xp: Any) -> Any:
    """Each entry `size` times along an axis, for `length` places from `start` within a block on."""
    repeated = xp.repeat(x, size, axis=axis)
    cut = [slice(None)] * x.ndim
    cut[axis] = slice(start % size, start % size + length)
    return repeated[tuple(cut)]

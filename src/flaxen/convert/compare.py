"""How far apart two checkpoints are, tensor by tensor."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from flaxen.convert.lazy import Box, LazyTensor, is_float, whole
from flaxen.convert.views import slabs

SLAB = 1 << 22
"""Bytes of each tensor in memory at a time."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """One tensor that is not the same in both.

    `elements` differ, out of `size`; `largest` is the largest distance of two values and
    `relative` the norm of all distances over that of the first tensor; NaN is far from any number.
    Tensors of other shapes are not compared any further.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    elements: int = 0
    size: int = 0
    largest: float = 0.0
    relative: float = 0.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What two checkpoints have in common; names are in the order of the files."""

    only_first: list[str]
    only_second: list[str]
    different: list[Difference]
    equal: int

    @property
    def same(self) -> bool:
        """Every tensor is in both, bit for bit."""
        return not (self.only_first or self.only_second or self.different)


def compare(
    first: Mapping[str, LazyTensor],
    second: Mapping[str, LazyTensor],
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints; a few slabs are in memory at a time.

    progress: told the bytes of `first` that were compared since the last call.
    """
    shared = [name for name in first if name in second]
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2), "flaxen-compare") as pool:
        found: list[Difference | None] = []
        for name, each in zip(
            shared, pool.map(lambda n: _difference(n, first[n], second[n]), shared), strict=True
        ):
            found.append(each)
            if progress is not None:
                progress(first[name].nbytes)
    different = [each for each in found if each is not None]
    return Comparison(
        only_first=[name for name in first if name not in second],
        only_second=[name for name in second if name not in first],
        different=different,
        equal=len(shared) - len(different),
    )


def _difference(name: str, a: LazyTensor, b: LazyTensor) -> Difference | None:
    head = Difference(name, (a.shape, b.shape), (a.dtype.name, b.dtype.name), size=a.size)
    if a.shape != b.shape:
        return head
    elements, largest, squares, scale = 0, 0.0, 0.0, 0.0
    for box in _boxes(a):
        one, other = a.read(box), b.read(box)
        unequal = _unequal(one, other)
        x, y = _values(one), _values(other)
        scale += float(np.sum(np.square(x), where=np.isfinite(x)))
        if unequal:
            with np.errstate(invalid="ignore"):
                distance = np.where(x == y, 0, np.abs(x - y))
            distance[np.isnan(distance)] = np.inf
            distance[np.isnan(x) & np.isnan(y)] = 0
            elements += unequal
            largest = max(largest, float(np.max(distance)))
            squares += float(np.sum(np.square(distance)))
    if a.dtype == b.dtype and not elements:
        return None
    relative = float(np.sqrt(squares / scale)) if scale else float(np.sqrt(squares))
    return dataclasses.replace(head, elements=elements, largest=largest, relative=relative)


def _unequal(a: np.ndarray, b: np.ndarray) -> int:
    """How many elements differ: in their bits, or between two dtypes in their values."""
    if a.dtype == b.dtype:
        x, y = (v.reshape(-1).view(np.uint8).reshape(-1, v.dtype.itemsize) for v in (a, b))
        return 0 if np.array_equal(x, y) else int(np.count_nonzero((x != y).any(1)))
    x, y = _values(a), _values(b)
    return int(np.count_nonzero((x != y) & ~(np.isnan(x) & np.isnan(y))))


def _boxes(tensor: LazyTensor) -> Iterator[Box]:
    return (box for box, _ in slabs(whole(tensor.shape), tensor.dtype.itemsize, SLAB))


def _values(values: np.ndarray) -> np.ndarray:
    """In a dtype that NumPy subtracts; complex numbers as pairs."""
    if values.dtype.kind == "c":
        pairs = np.stack([np.real(values), np.imag(values)], axis=-1)
        return pairs.astype(np.float64)
    small = is_float(values.dtype) and values.dtype.itemsize < 4
    return values.astype(np.float32 if small else np.float64)

"""Views of lazy tensors: each sends a box back to boxes of its sources."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from flaxen.convert.lazy import Box, LazyTensor, Mapped, box_shape, copy, shifted
from flaxen.convert.reshaping import Reshape
from flaxen.core.errors import CheckpointError

CHUNK = 1 << 21
"""Bytes of a dtype conversion's intermediate copy."""


class Permuted(LazyTensor):
    def __init__(self, parent: LazyTensor, order: tuple[int, ...]):
        if sorted(order) != list(range(parent.ndim)):
            raise ValueError(f"{order} is no order of the axes of {parent}.")
        self.parent, self.order = parent, order
        self.inverse = tuple(int(i) for i in np.argsort(order))
        self.shape = tuple(parent.shape[i] for i in order)
        self.dtype = parent.dtype

    def fill(self, box: Box, out: np.ndarray) -> None:
        self.parent.fill(tuple(box[i] for i in self.inverse), out.transpose(self.inverse))

    def mapped(self, box: Box) -> Mapped | None:
        found = self.parent.mapped(tuple(box[i] for i in self.inverse))
        return found and found._replace(array=found.array.transpose(self.order))


class Cropped(LazyTensor):
    def __init__(self, parent: LazyTensor, box: Box):
        self.parent, self.box = parent, box
        self.shape, self.dtype = box_shape(box), parent.dtype

    def _outer(self, box: Box) -> Box:
        return tuple(shifted(b, c.start) for b, c in zip(box, self.box, strict=True))

    def fill(self, box: Box, out: np.ndarray) -> None:
        self.parent.fill(self._outer(box), out)

    def mapped(self, box: Box) -> Mapped | None:
        return self.parent.mapped(self._outer(box))


class Reshaped(LazyTensor):
    def __init__(self, parent: LazyTensor, shape: tuple[int, ...]):
        if math.prod(shape) != parent.size:
            raise ValueError(f"{parent} has not the size of shape {shape}.")
        self.parent, self.shape, self.dtype = parent, shape, parent.dtype
        self.plan = Reshape(parent.shape, shape)

    def fill(self, box: Box, out: np.ndarray) -> None:
        old, _, _ = self.plan.cover(box)
        exact = math.prod(box_shape(old)) == out.size
        target = _as_view(out, box_shape(old)) if exact else None
        if target is not None:
            self.parent.fill(old, target)
            return
        found = self.mapped(box)
        if found is not None:
            found.counter.add(out.nbytes)
            copy(out, found.array)
            return
        for piece, place in self.plan.pieces(box):
            target = _as_view(out[(*place, ...)], box_shape(piece))
            if target is not None:
                self.parent.fill(piece, target)
            else:
                out[place] = self.parent.read(piece).reshape(box_shape(place))

    def mapped(self, box: Box) -> Mapped | None:
        if 0 in box_shape(box):
            return None
        old, shape, cut = self.plan.cover(box)
        found = self.parent.mapped(old)
        array = None if found is None else _as_view(found.array, shape)
        return None if found is None or array is None else found._replace(array=array[(*cut, ...)])


class Converted(LazyTensor):
    """Another dtype; converts in slabs, so that the copy in the old dtype stays small."""

    def __init__(self, parent: LazyTensor, dtype: np.dtype):
        self.parent, self.shape, self.dtype = parent, parent.shape, dtype

    def fill(self, box: Box, out: np.ndarray) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            found = self.parent.mapped(box)
            if found is not None:
                found.counter.add(found.array.nbytes)
                copy(out, found.array)
                return
            source = self.parent.dtype
            buffer = np.empty(min(CHUNK, out.size * source.itemsize), np.uint8)
            for part, inside in slabs(box, source.itemsize, CHUNK):
                target = out[(*inside, ...)]
                values = buffer[: target.size * source.itemsize].view(source)
                self.parent.fill(part, values.reshape(target.shape))
                np.copyto(target, values.reshape(target.shape), casting="unsafe")


class Concatenated(LazyTensor):
    def __init__(self, parts: tuple[LazyTensor, ...], dim: int):
        self.parts, self.dim = parts, dim % parts[0].ndim
        self.starts = np.cumsum([0] + [p.shape[self.dim] for p in parts]).tolist()
        _same(p.shape[: self.dim] + p.shape[self.dim + 1 :] for p in parts)
        _same(p.dtype for p in parts)
        first = parts[0]
        self.shape = (*first.shape[: self.dim], self.starts[-1], *first.shape[self.dim + 1 :])
        self.dtype = first.dtype

    def _split(self, box: Box) -> Iterator[tuple[LazyTensor, Box, slice]]:
        """Each part that is met, the box in it, and its place along `dim` in the result."""
        want = box[self.dim]
        first = int(np.searchsorted(self.starts, want.start, side="right")) - 1
        for part, start in zip(self.parts[first:], self.starts[first:], strict=False):
            if start >= want.stop:
                return
            low, high = max(want.start, start), min(want.stop, start + part.shape[self.dim])
            if low < high:
                inner = (*box[: self.dim], slice(low - start, high - start), *box[self.dim + 1 :])
                yield part, inner, slice(low - want.start, high - want.start)

    def fill(self, box: Box, out: np.ndarray) -> None:
        for part, inner, place in self._split(box):
            part.fill(inner, out[(slice(None),) * self.dim + (place,)])

    def mapped(self, box: Box) -> Mapped | None:
        found = list(self._split(box))
        return found[0][0].mapped(found[0][1]) if len(found) == 1 else None


class Stacked(LazyTensor):
    def __init__(self, parts: tuple[LazyTensor, ...]):
        _same(p.shape for p in parts)
        _same(p.dtype for p in parts)
        self.parts = parts
        self.shape, self.dtype = (len(parts), *parts[0].shape), parts[0].dtype

    def fill(self, box: Box, out: np.ndarray) -> None:
        for i, part in enumerate(self.parts[box[0]]):
            part.fill(box[1:], out[i, ...])

    def mapped(self, box: Box) -> Mapped | None:
        if box[0].stop - box[0].start != 1:
            return None
        found = self.parts[box[0].start].mapped(box[1:])
        return found and found._replace(array=found.array[None])


class Padded(LazyTensor):
    """The tensor in the first corner of a larger shape, and zeros."""

    def __init__(self, parent: LazyTensor, shape: tuple[int, ...]):
        self.parent, self.shape, self.dtype = parent, shape, parent.dtype

    def fill(self, box: Box, out: np.ndarray) -> None:
        ends = [min(s.stop, n) for s, n in zip(box, self.parent.shape, strict=True)]
        inner = tuple(slice(s.start, max(s.start, end)) for s, end in zip(box, ends, strict=True))
        have = box_shape(inner)
        if have != out.shape:
            out[...] = np.zeros((), self.dtype)
        if 0 not in have:
            self.parent.fill(inner, out[(*(slice(0, n) for n in have), ...)])

    def mapped(self, box: Box) -> Mapped | None:
        inside = all(s.stop <= n for s, n in zip(box, self.parent.shape, strict=True))
        return self.parent.mapped(box) if inside else None


class Computed(LazyTensor):
    """Values that a function makes of the box that is asked for, such as scaled weights."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, compute: Callable[[Box], np.ndarray]
    ):
        self.shape, self.dtype, self.compute = shape, dtype, compute

    def fill(self, box: Box, out: np.ndarray) -> None:
        copy(out, self.compute(box))


def slabs(box: Box, itemsize: int, limit: int) -> Iterator[tuple[Box, Box]]:
    """Cut a box into (part, its place in the box), each of at most `limit` bytes or one element."""
    shape = box_shape(box)
    if math.prod(shape) * itemsize <= limit or not shape:
        yield box, tuple(slice(0, n) for n in shape)
        return
    axis = next(i for i, n in enumerate(shape) if n > 1)
    row = math.prod(shape[axis + 1 :]) * itemsize
    rows = max(1, limit // row)
    for start in range(0, shape[axis], rows):
        count = min(rows, shape[axis] - start)
        outer = shifted(slice(start, start + count), box[axis].start)
        part = (*box[:axis], outer, *box[axis + 1 :])
        for smaller, place in slabs(part, itemsize, limit) if rows == 1 else [(part, None)]:
            inner = place[axis + 1 :] if place else tuple(slice(0, n) for n in shape[axis + 1 :])
            yield smaller, (*(slice(0, 1),) * axis, slice(start, start + count), *inner)


def _same(values) -> None:
    kinds = list(dict.fromkeys(values))
    if len(kinds) > 1:
        raise CheckpointError(f"Cannot join tensors that differ: {kinds[0]} and {kinds[1]}.")


def _as_view(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """The same memory in another shape, or None if that needs a copy."""
    try:
        return array.reshape(shape, copy=False)
    except ValueError:
        return None

"""How a box of a reshaped tensor falls apart into boxes of the original."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from functools import cached_property

from flaxen.convert.lazy import Box, box_shape, whole


@dataclasses.dataclass(frozen=True)
class Group:
    """Neighbouring axes of the old shape that hold the elements of some of the new one."""

    old: tuple[int, ...]
    new: tuple[int, ...]

    def pieces(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """(box of the old axes, box of the new axes), each holding the same run of elements."""
        if self.old == self.new:
            yield box, box
            return
        for start, stop in runs(box, self.new):
            yield from self._matched(start, stop)

    def _matched(self, start: int, stop: int) -> Iterator[tuple[Box, Box]]:
        """Cut a stretch until each piece is a box of the old axes and of the new ones."""
        both = [list(ranges(start, stop, shape)) for shape in (self.old, self.new)]
        for boxes, shape in zip(both, (self.old, self.new), strict=True):
            if len(boxes) > 1:
                for box in boxes:
                    first = _flat([s.start for s in box], shape)
                    yield from self._matched(first, first + math.prod(box_shape(box)))
                return
        yield both[0][0], both[1][0]


class Reshape:
    """The plan of one reshape."""

    def __init__(self, old: tuple[int, ...], new: tuple[int, ...]):
        self.old, self.new = old, new

    @cached_property
    def groups(self) -> list[Group]:
        """Axes matched from the left: an axis that a reshape leaves alone never cuts a piece."""
        old, new, groups = list(self.old), list(self.new), []
        while old or new:
            left, right = old[:1], new[:1]
            del old[:1], new[:1]
            while math.prod(left) != math.prod(right):
                if math.prod(left) < math.prod(right):
                    left.append(old.pop(0))
                else:
                    right.append(new.pop(0))
            groups.append(Group(tuple(left), tuple(right)))
        return groups

    def pieces(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """(box of the original, its place in `box`): disjoint, and together all of `box`."""
        each, at = [], 0
        for group in self.groups:
            inner = box[at : at + len(group.new)]
            each.append(
                [
                    (old, tuple(_relative(n, b) for n, b in zip(new, inner, strict=True)))
                    for old, new in group.pieces(inner)
                ]
            )
            at += len(group.new)
        for combination in itertools.product(*each):
            old = tuple(s for part, _ in combination for s in part)
            yield old, tuple(s for _, part in combination for s in part)

    def cover(self, box: Box) -> tuple[Box, tuple[int, ...], Box]:
        """A box of the original that covers `box`, its new shape, and where `box` lies in that."""
        old, shape, cut, at = [], [], [], 0
        for group in self.groups:
            inner = box[at : at + len(group.new)]
            at += len(group.new)
            pieces = list(itertools.islice(group.pieces(inner), 2))
            if len(pieces) == 1:
                old += pieces[0][0]
                shape += box_shape(inner)
                cut += whole(box_shape(inner))
            else:
                old += whole(group.old)
                shape += group.new
                cut += inner
        return tuple(old), tuple(shape), tuple(cut)


def runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The contiguous stretches, in flat positions, that a box of a shape consists of."""
    inner = len(shape)
    while inner > 0 and box[inner - 1] == slice(0, shape[inner - 1]):
        inner -= 1
    row = math.prod(shape[inner:])
    if inner == 0:
        yield 0, row
        return
    last = box[inner - 1]
    for outer in itertools.product(*(range(s.start, s.stop) for s in box[: inner - 1])):
        base = _flat(outer, shape[: inner - 1]) * shape[inner - 1]
        yield (base + last.start) * row, (base + last.stop) * row


def ranges(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """The fewest boxes, in order, that make up a stretch of flat positions."""
    if len(shape) == 0:
        yield ()
        return
    row = math.prod(shape[1:])
    low, high = start // row, (stop - 1) // row + 1
    if high - low == 1 and (stop - start) < row:
        for inner in ranges(start - low * row, stop - low * row, shape[1:]):
            yield (slice(low, high), *inner)
        return
    if start > low * row:
        yield from ranges(start, (low + 1) * row, shape)
        low += 1
    whole_rows = stop // row
    if whole_rows > low:
        yield (slice(low, whole_rows), *whole(shape[1:]))
    if stop > whole_rows * row:
        yield from ranges(whole_rows * row, stop, shape)


def _flat(index, shape: tuple[int, ...]) -> int:
    at = 0
    for i, n in zip(index, shape, strict=True):
        at = at * n + i
    return at


def _relative(part: slice, to: slice) -> slice:
    return slice(part.start - to.start, part.stop - to.start)

"""Lists of equal modules as one tensor with an axis for the list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flaxen.convert.lazy import LazyTensor, stack
from flaxen.convert.ops.base import ConversionOps, Tensors
from flaxen.convert.ops.chunk import cut, numbered


class MergeModulelist(ConversionOps):
    """Stack the tensors of each pattern along a new axis `dim`; one that is stacked already stays.

    Tensors of several patterns stay under these, for the operation that joins them.
    """

    def __init__(self, dim: int = 0):
        self.dim = dim

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        **kwargs: Any,
    ) -> Tensors:
        if len(input_dict) == 1 and len(target_patterns) != 1:
            raise self._undefined("one target pattern for one source", target_patterns)
        out: Tensors = {}
        for pattern, value in input_dict.items():
            key = target_patterns[0] if len(input_dict) == 1 else pattern
            out[key] = self._stacked(pattern, value) if isinstance(value, list) else value
        return out

    def _stacked(self, pattern: str, tensors: list[LazyTensor]) -> LazyTensor:
        if not tensors:
            raise self._undefined(f"the tensors of {pattern!r}", [])
        return stack_along(tensors, self._axis(tensors[0], self.dim, tensors[0].ndim + 1))

    @property
    def reverse_op(self) -> SplitModulelist:
        return SplitModulelist(self.dim)


class SplitModulelist(ConversionOps):
    """One tensor for each index of the axis `dim`, which they no longer have.

    They are named by the target pattern with its `*` counted up; with several patterns, each by
    its own.
    """

    def __init__(self, dim: int = 0):
        self.dim = dim

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        **kwargs: Any,
    ) -> Tensors:
        if len(input_dict) == 1 and len(target_patterns) != 1:
            raise self._undefined("one target pattern for one source", target_patterns)
        out: Tensors = {}
        for pattern, value in input_dict.items():
            tensor = self._single(pattern, value)
            pieces = unstack(tensor, self._axis(tensor, self.dim))
            name = target_patterns[0] if len(input_dict) == 1 else pattern
            out.update(zip(numbered(name, len(pieces)), pieces, strict=True))
        return out

    @property
    def reverse_op(self) -> MergeModulelist:
        return MergeModulelist(self.dim)


def stack_along(tensors: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """Equal tensors along a new axis."""
    stacked = stack(tensors)
    order = list(range(1, stacked.ndim))
    return stacked.permute([*order[:dim], 0, *order[dim:]])


def unstack(tensor: LazyTensor, dim: int) -> list[LazyTensor]:
    """The tensors along an axis, without it."""
    shape = tensor.shape[:dim] + tensor.shape[dim + 1 :]
    return [piece.reshape(shape) for piece in cut(tensor, dim, [1] * tensor.shape[dim])]

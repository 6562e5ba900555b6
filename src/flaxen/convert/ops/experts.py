"""One list of experts that holds those of several modalities, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flaxen.convert.lazy import LazyTensor, concat
from flaxen.convert.ops.base import ConversionOps, Tensors, as_list
from flaxen.convert.ops.chunk import cut, equal_sizes, numbered
from flaxen.convert.ops.modulelist import stack_along, unstack
from flaxen.core.errors import CheckpointError


class ErnieFuseAndSplitTextVisionExperts(ConversionOps):
    """Share each source's experts out, in order, among the targets, and stack each share.

    In a target the experts lie along `stack_dim`, and the stacks of the sources (such as gate and
    up) are joined along `concat_dim`.
    """

    supports_many_to_many = True

    def __init__(self, stack_dim: int = 0, concat_dim: int = 1):
        self.stack_dim, self.concat_dim = stack_dim, concat_dim

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        **kwargs: Any,
    ) -> Tensors:
        experts = [as_list(found) for found in _sources(input_dict, source_patterns)]
        counts = [len(found) for found in experts]
        if len(set(counts)) != 1:
            raise CheckpointError(
                f"Each of {list(source_patterns)} needs the same number of experts, "
                f"but found {counts}."
            )
        out: Tensors = {}
        start = 0
        sizes = equal_sizes(counts[0], len(target_patterns))
        for target, size in zip(target_patterns, sizes, strict=True):
            out[target] = self._fused([found[start : start + size] for found in experts])
            start += size
        return out

    def _fused(self, shares: list[list[LazyTensor]]) -> LazyTensor:
        first = shares[0][0]
        dim = self._axis(first, self.stack_dim, first.ndim + 1)
        stacks = [stack_along(share, dim) for share in shares]
        return concat(stacks, self._axis(stacks[0], self.concat_dim))

    @property
    def reverse_op(self) -> ErnieSplitAndDecoupleTextVisionExperts:
        return ErnieSplitAndDecoupleTextVisionExperts(self.stack_dim, self.concat_dim)


class ErnieSplitAndDecoupleTextVisionExperts(ConversionOps):
    """Single experts again: those of all sources, counted through in the order of the sources."""

    supports_many_to_many = True

    def __init__(self, stack_dim: int = 0, concat_dim: int = 1):
        self.stack_dim, self.concat_dim = stack_dim, concat_dim

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        **kwargs: Any,
    ) -> Tensors:
        experts: list[list[LazyTensor]] = [[] for _ in target_patterns]
        sources = _sources(input_dict, source_patterns)
        for pattern, value in zip(source_patterns, sources, strict=True):
            tensor = self._single(pattern, value)
            dim = self._axis(tensor, self.concat_dim)
            sizes = equal_sizes(tensor.shape[dim], len(target_patterns))
            for found, piece in zip(experts, cut(tensor, dim, sizes), strict=True):
                found += unstack(piece, self._axis(piece, self.stack_dim))
        return {
            name: tensor
            for target, found in zip(target_patterns, experts, strict=True)
            for name, tensor in zip(numbered(target, len(found)), found, strict=True)
        }

    @property
    def reverse_op(self) -> ErnieFuseAndSplitTextVisionExperts:
        return ErnieFuseAndSplitTextVisionExperts(self.stack_dim, self.concat_dim)


def _sources(
    input_dict: Tensors, source_patterns: Sequence[str]
) -> list[LazyTensor | list[LazyTensor]]:
    for pattern in source_patterns:
        if pattern not in input_dict:
            raise CheckpointError(
                f"Expected pattern {pattern} in collected tensors but only found tensors for: "
                f"{list(input_dict)}."
            )
    return [input_dict[pattern] for pattern in source_patterns]

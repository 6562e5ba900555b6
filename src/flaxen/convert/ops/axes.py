"""The elements of a tensor in another order along its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flaxen.convert.lazy import LazyTensor
from flaxen.convert.ops.base import ConversionOps, Tensors, key_of_one
from flaxen.core.errors import CheckpointError


class IdentityOp(ConversionOps):
    """Change nothing: the inverse of what need not be undone."""

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        **kwargs: Any,
    ) -> Tensors:
        return input_dict

    @property
    def reverse_op(self) -> IdentityOp:
        return self


class Transpose(ConversionOps):
    """Swap two axes.

    check_dims: leave a tensor that already has the shape of the model's tensor `full_layer_name`.
    """

    def __init__(self, dim0: int = 0, dim1: int = 1, check_dims: bool = False):
        self.dim0, self.dim1, self.check_dims = dim0, dim1, check_dims

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        *,
        full_layer_name: str = "",
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        **kwargs: Any,
    ) -> Tensors:
        tensor = self._only(input_dict)
        wanted = (shapes or {}).get(full_layer_name) if self.check_dims else None
        if wanted is None or tuple(wanted) != tensor.shape:
            a, b = self._axis(tensor, self.dim0), self._axis(tensor, self.dim1)
            order = list(range(tensor.ndim))
            order[a], order[b] = b, a
            tensor = tensor.permute(order)
        return {key_of_one(source_patterns, target_patterns): tensor}

    @property
    def reverse_op(self) -> Transpose:
        return Transpose(self.dim1, self.dim0, self.check_dims)


class Interleave(ConversionOps):
    """Sort the pairs of an axis apart: `a0 b0 a1 b1 ...` becomes `a0 a1 ... b0 b1 ...`.

    inverse: mix the halves of the axis into pairs.
    """

    def __init__(self, dim: int = 0, inverse: bool = False):
        self.dim, self.inverse = dim, inverse

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        **kwargs: Any,
    ) -> Tensors:
        tensor = self._only(input_dict)
        dim = self._axis(tensor, self.dim)
        return {target_patterns[0]: sort_pairs(tensor, dim, inverse=self.inverse)}

    @property
    def reverse_op(self) -> Interleave:
        return Interleave(self.dim, not self.inverse)


def sort_pairs(tensor: LazyTensor, dim: int, blocks: int = 1, inverse: bool = False) -> LazyTensor:
    """In each of equal blocks of an axis, all first elements of pairs, then all second ones.

    inverse: in each block, pairs of an element of the first half and one of the second.

    Raises:
        CheckpointError: the axis does not consist of so many blocks of pairs.
    """
    size = tensor.shape[dim]
    if blocks < 1 or size % (2 * blocks):
        raise CheckpointError(
            f"Cannot sort dimension {dim} of a tensor of shape {tensor.shape} in {blocks} "
            f"block(s) of pairs: {size} is no multiple of {2 * blocks}."
        )
    half = size // blocks // 2
    pairs = [2, half] if inverse else [half, 2]
    order = list(range(tensor.ndim + 2))
    order[dim + 1], order[dim + 2] = dim + 2, dim + 1
    apart = tensor.reshape([*tensor.shape[:dim], blocks, *pairs, *tensor.shape[dim + 1 :]])
    return apart.permute(order).reshape(tensor.shape)

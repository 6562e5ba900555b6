"""Fused projections of vision towers, apart and with their rows in the order for rotary halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flaxen.convert.ops.base import ConversionOps, Tensors
from flaxen.convert.ops.chunk import Chunk, Concatenate
from flaxen.convert.ops.rope import PermuteForRope

_SUBCONFIG = "vision_config"


class VisionUnfuseAndPermuteForRope(ConversionOps):
    """`Chunk(dim)`, then `PermuteForRope("vision_config", ...)`."""

    def __init__(
        self, dim: int = 0, permute_layer_names: list[str] | None = None, inverse: bool = False
    ):
        self.dim, self.permute_layer_names, self.inverse = dim, permute_layer_names, inverse

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        **kwargs: Any,
    ) -> Tensors:
        pieces = Chunk(self.dim).convert(input_dict, source_patterns, target_patterns, **kwargs)
        permute = PermuteForRope(_SUBCONFIG, self.permute_layer_names, self.inverse)
        return permute.convert(pieces, source_patterns, target_patterns, **kwargs)

    @property
    def reverse_op(self) -> VisionFuseAndPermuteForRope:
        return VisionFuseAndPermuteForRope(self.dim, self.permute_layer_names, not self.inverse)


class VisionFuseAndPermuteForRope(ConversionOps):
    """`PermuteForRope("vision_config", ..., inverse)`, then `Concatenate(dim)`."""

    def __init__(
        self, dim: int = 0, permute_layer_names: list[str] | None = None, inverse: bool = True
    ):
        self.dim, self.permute_layer_names, self.inverse = dim, permute_layer_names, inverse

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        **kwargs: Any,
    ) -> Tensors:
        permute = PermuteForRope(_SUBCONFIG, self.permute_layer_names, self.inverse)
        pieces = permute.convert(input_dict, source_patterns, target_patterns, **kwargs)
        # One source for one target is under the target already.
        order = source_patterns if len(source_patterns) > 1 else list(pieces)
        return Concatenate(self.dim).convert(pieces, order, target_patterns, **kwargs)

    @property
    def reverse_op(self) -> VisionUnfuseAndPermuteForRope:
        return VisionUnfuseAndPermuteForRope(self.dim, self.permute_layer_names, not self.inverse)

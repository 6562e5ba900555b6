"""Patch embeddings: a convolution whose stride is its kernel is a linear layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flaxen.convert.ops.base import ConversionOps, Tensors, key_of_one
from flaxen.core.errors import CheckpointError


class Conv3dToLinear(ConversionOps):
    """`[out, in, time, height, width]` to `[out, in * time * height * width]`; linear ones stay."""

    def __init__(self, in_channels: int, kernel_size: Sequence[int]):
        self.in_channels, self.kernel_size = in_channels, kernel_size

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        **kwargs: Any,
    ) -> Tensors:
        tensor = self._only(input_dict)
        if tensor.ndim == 5:
            tensor = tensor.reshape((tensor.shape[0], math.prod(tensor.shape[1:])))
        elif tensor.ndim != 2:
            raise CheckpointError(
                f"Conv3dToLinear expects a 5D or 2D tensor, got {tensor.ndim}D: {tensor.shape}."
            )
        return {key_of_one(source_patterns, target_patterns): tensor}

    @property
    def reverse_op(self) -> LinearToConv3d:
        return LinearToConv3d(self.in_channels, self.kernel_size)


class LinearToConv3d(ConversionOps):
    """`[out, in_channels * time * height * width]` to `[out, in_channels, *kernel_size]`."""

    def __init__(self, in_channels: int, kernel_size: Sequence[int]):
        self.in_channels, self.kernel_size = in_channels, kernel_size

    def convert(
        self,
        input_dict: Tensors,
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        **kwargs: Any,
    ) -> Tensors:
        tensor = self._only(input_dict)
        shape = (*tensor.shape[:1], self.in_channels, *self.kernel_size)
        if tensor.ndim == 0 or math.prod(shape) != tensor.size:
            raise CheckpointError(
                f"Cannot reshape tensor with shape {tensor.shape} into {shape}: "
                f"{tensor.size} elements for {math.prod(shape)}."
            )
        return {key_of_one(source_patterns, target_patterns): tensor.reshape(shape)}

    @property
    def reverse_op(self) -> Conv3dToLinear:
        return Conv3dToLinear(self.in_channels, self.kernel_size)

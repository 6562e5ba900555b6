"""Rounded weights in the format of GPTQ, as Transformers and GPTQModel load it.

Source: GPTQ, https://arxiv.org/abs/2210.17323; the order of bits is that which `schemes.int_groups`
reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flaxen.convert.bits import pack
from flaxen.convert.lazy import Box, LazyTensor
from flaxen.convert.schemes.base import QuantizedTensor
from flaxen.convert.schemes.int_groups import WORD
from flaxen.convert.views import Computed
from flaxen.core.errors import CheckpointError
from flaxen.quantize.normal_float import NormalFloat
from flaxen.quantize.rounded import RoundedWeight

Layout = Callable[[Mapping[str, LazyTensor]], dict[str, LazyTensor]]
"""From tensors of our weights' shapes, by path, to those of the file, by name."""


def gptq_tensors(
    leaves: Mapping[str, RoundedWeight], layout: Layout
) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """What a file holds of rounded weights, and its `quantization_config`.

    Codes and scales are written as they are: read again, the values are the same bit for bit.
    leaves: with lazy parts, by path. layout: how weights lie in the file.

    Raises:
        CheckpointError: normal floats; weights of different bits or groups, which the format cannot
            tell apart; or a matrix whose numbers fill no whole words.
    """
    if any(isinstance(leaf.rounding, NormalFloat) for leaf in leaves.values()):
        raise CheckpointError(
            "GPTQ has integers alone, and the model holds normal floats; give dtype= to write "
            "plain weights."
        )
    kinds = {_kind(leaf) for leaf in leaves.values()}
    if len(kinds) != 1:
        raise CheckpointError(
            f"The rounded weights are of {len(kinds)} kinds (bits, inputs that share a scale): "
            f"{sorted(kinds)}. A GPTQ folder has one; round with one Rounding(bits, group), or "
            "give dtype= to write plain weights."
        )
    bits, group = kinds.pop()
    codes = layout({path: codes_of(leaf) for path, leaf in leaves.items()})
    scales = layout({path: spread_scales(leaf) for path, leaf in leaves.items()})
    out: dict[str, LazyTensor] = {}
    for name, tensor in codes.items():
        out |= _packed(name, tensor, scales[name], bits, group)
    config = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
    }
    return out, config


def _kind(leaf: RoundedWeight) -> tuple[int, int]:
    size, ins = leaf.rounding.group or -1, math.prod(leaf.inner[leaf.outs :])
    return leaf.rounding.bits, -1 if size == ins else size


def _packed(
    name: str, codes: LazyTensor, scales: LazyTensor, bits: int, group: int
) -> dict[str, LazyTensor]:
    """The parts of one matrix [out, in]; `scales` has its shape too."""
    if len(codes.shape) != 2:
        raise CheckpointError(f"{name} has shape {list(codes.shape)}; GPTQ packs matrices alone.")
    outs, ins = codes.shape
    size, each = ins if group == -1 else group, WORD // bits
    if outs % each or ins % each or not name.endswith(".weight"):
        raise CheckpointError(
            f"{name} has shape {[outs, ins]}; GPTQ packs {each} inputs and {each} outputs in a "
            "word. Leave it as it is by a rule: None."
        )
    middle = 2 ** (bits - 1)

    def words(box: Box) -> np.ndarray:
        inputs = slice(box[0].start * each, box[0].stop * each)
        numbers = codes.read((box[1], inputs)).astype(np.int16) + middle
        return pack(numbers, bits, np.uint32).view(np.int32).T

    def by_group(box: Box) -> np.ndarray:
        rows = [scales.read((box[1], slice(i * size, i * size + 1))) for i in _indices(box[0])]
        return np.concatenate(rows, axis=1).T

    # The format's first version stores one less than the zero.
    zero = pack(np.full((1, each), middle - 1), bits, np.uint32).view(np.int32)
    int32, module = np.dtype(np.int32), name.removesuffix("weight")
    zeros = lambda box: np.broadcast_to(zero, tuple(s.stop - s.start for s in box))
    index = lambda box: np.asarray(_indices(box[0]), np.int32) // np.int32(size)
    return {
        f"{module}qweight": Computed((ins // each, outs), int32, words),
        f"{module}qzeros": Computed((ins // size, outs // each), int32, zeros),
        f"{module}scales": Computed((ins // size, outs), scales.dtype, by_group),
        f"{module}g_idx": Computed((ins,), int32, index),
    }


def _indices(part: slice) -> range:
    return range(part.start, part.stop)


def codes_of(leaf: RoundedWeight) -> LazyTensor:
    """The codes of a leaf of lazy parts, in the weight's shape."""
    return _Codes(leaf).reshape(leaf.shape)


def spread_scales(leaf: RoundedWeight) -> LazyTensor:
    """The scale of every value, in the weight's shape: layouts take it apart as they do weights."""
    return _Spread(leaf).reshape(leaf.shape)


class _Flat(LazyTensor):
    """Something about each value of a leaf (..., out, in)."""

    def __init__(self, leaf: RoundedWeight):
        self.rounding, self.parts = leaf.rounding, leaf.parts
        self.shape = leaf.flat_shape


class _Codes(_Flat):
    dtype = np.dtype(np.int8)

    def fill(self, box: Box, out: np.ndarray) -> None:
        cover = self.rounding.cover(box)
        stored = self.parts["codes"].read(self.rounding.boxes(cover, {})["codes"])
        out[...] = self.rounding.codes(stored)[_within(box, cover)]


class _Spread(_Flat):
    dtype = np.dtype(np.float16)

    def fill(self, box: Box, out: np.ndarray) -> None:
        cover = self.rounding.cover(box)
        scales = self.parts["scales"].read(self.rounding.boxes(cover, {})["scales"])
        out[...] = np.repeat(scales, self.rounding.group or 1, -1)[_within(box, cover)]


def _within(box: Box, cover: Box) -> Box:
    return tuple(
        slice(b.start - c.start, b.stop - c.start) for b, c in zip(box, cover, strict=True)
    )


def plain_tensor(leaf: RoundedWeight) -> LazyTensor:
    """The values of a leaf of lazy parts, in the weight's shape and dtype."""
    flat = QuantizedTensor(leaf.rounding, leaf.parts, leaf.flat_shape, np.dtype(leaf.dtype))
    return flat.reshape(leaf.shape)

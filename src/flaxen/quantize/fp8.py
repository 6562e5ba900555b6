"""Matrices written as float8 with a scale for each block, as Transformers' fine-grained FP8 loads
them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from flaxen.convert.lazy import Box, LazyTensor, is_float, shifted
from flaxen.convert.schemes.base import blocks, spread
from flaxen.convert.views import slabs
from flaxen.core.errors import CheckpointError

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = np.float32(448)
CHUNK = 8 << 20
"""Bytes of float32 that are looked at at a time, and at least a row of blocks."""

SIZES = (128, 64, 32, 16)
"""Sides of blocks, the usual one first."""

KEPT = r"(^|\.)(lm_head|embed\w*|\w*embed|\w*embeddings?|wte|wpe|router|gate)\.weight$"
"""Names of weights that are no projections, or decide too much: heads, tables, routers."""


def quantize_fp8(
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Any],
    *,
    block: tuple[int, int] | None = None,
    kept: str = KEPT,
) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    """A checkpoint's tensors and config with its matrices in float8; nothing is read yet.

    Each float matrix named `*.weight` becomes `weight` (E4M3) and `weight_scale_inv` (float32, one
    for each block: its largest magnitude / 448), so a value is off by at most half a step of E4M3
    at its block's scale. Blocks are 128 x 128, or the largest of 64, 32 and 16 that more matrices
    divide into. Names that match the expression `kept` stay, and so do matrices above a block's
    size that are no multiple of it, for which readers disagree on the blocks; the config's
    `quantization_config` lists all that stay.

    Raises:
        CheckpointError: the checkpoint is quantised already, or no matrix divides into blocks.
    """
    if "quantization_config" in config:
        raise CheckpointError(
            "The checkpoint is quantised already; open it as plain weights first."
        )
    matrices = {name: t for name, t in tensors.items() if _is_matrix(name, t)}
    shapes = [t.shape for name, t in matrices.items() if not re.search(kept, name)]
    block = block or max(((n, n) for n in SIZES), key=lambda b: sum(_fits(s, b) for s in shapes))
    if not any(_fits(shape, block) for shape in shapes):
        raise CheckpointError(
            f"No matrix divides into blocks of {block[0]} x {block[1]}; choose other blocks, or "
            "another way to quantise."
        )
    out: dict[str, LazyTensor] = {}
    stay: list[str] = []
    for name, tensor in tensors.items():
        out[name] = tensor
        if name not in matrices:
            continue
        if re.search(kept, name) or not _fits(tensor.shape, block):
            stay.append(name.removesuffix(".weight"))
            continue
        out[name] = Codes(tensor, block)
        out[f"{name}_scale_inv"] = Scales(tensor, block)
    about = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": stay,
    }
    return out, {**config, "quantization_config": about}


def _is_matrix(name: str, tensor: LazyTensor) -> bool:
    return tensor.ndim == 2 and name.endswith(".weight") and is_float(tensor.dtype)


def _fits(shape: tuple[int, ...], block: tuple[int, int]) -> bool:
    return all(n % size == 0 or n < size for n, size in zip(shape, block, strict=True))


class Scales(LazyTensor):
    """The scale of each block of a matrix: its largest magnitude / 448, or 1 if that is 0."""

    dtype = np.dtype(np.float32)

    def __init__(self, source: LazyTensor, block: tuple[int, int]):
        self.source, self.block = source, block
        met = (blocks(slice(0, n), size) for n, size in zip(source.shape, block, strict=True))
        self.shape = tuple(part.stop for part in met)

    def fill(self, box: Box, out: np.ndarray) -> None:
        for part, inside in slabs(box, math.prod(self.block) * 4, CHUNK):
            values = self.source.read(_area(part, self.block, self.source.shape))
            out[inside] = _scales(values.astype(np.float32), self.block)


class Codes(LazyTensor):
    """A matrix in float8, each block divided by its scale."""

    dtype = FP8

    def __init__(self, source: LazyTensor, block: tuple[int, int]):
        self.source, self.block, self.shape = source, block, source.shape

    def fill(self, box: Box, out: np.ndarray) -> None:
        met = tuple(map(blocks, box, self.block))
        for part, _ in slabs(met, math.prod(self.block) * 4, CHUNK):
            cover = _area(part, self.block, self.shape)
            wanted = tuple(
                slice(max(b.start, c.start), min(b.stop, c.stop))
                for b, c in zip(box, cover, strict=True)
            )
            place = tuple(shifted(w, -b.start) for w, b in zip(wanted, box, strict=True))
            cut = tuple(shifted(w, -c.start) for w, c in zip(wanted, cover, strict=True))
            out[place] = self._codes(cover)[cut]

    def _codes(self, cover: Box) -> np.ndarray:
        values = self.source.read(cover).astype(np.float32)
        scales = _scales(values, self.block)
        for axis, size in enumerate(self.block):
            scales = spread(scales, size, axis, 0, values.shape[axis], np)
        return np.clip(values / scales, -LARGEST, LARGEST).astype(FP8)


def _area(part: Box, block: tuple[int, int], shape: tuple[int, ...]) -> Box:
    """The values of some blocks."""
    return tuple(
        slice(p.start * size, min(p.stop * size, n))
        for p, size, n in zip(part, block, shape, strict=True)
    )


def _scales(values: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    rows = np.maximum.reduceat(np.abs(values), np.arange(0, values.shape[0], block[0]), axis=0)
    largest = np.maximum.reduceat(rows, np.arange(0, values.shape[1], block[1]), axis=1)
    scales = largest / LARGEST
    return np.where(scales > 0, scales, np.float32(1))

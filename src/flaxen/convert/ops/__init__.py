"""Operations of the conversion system, each with its inverse."""

from __future__ import annotations

from flaxen.convert.ops.axes import IdentityOp, Interleave, Transpose
from flaxen.convert.ops.base import ConversionOps, Tensors
from flaxen.convert.ops.chunk import Chunk, Concatenate, Split
from flaxen.convert.ops.conv import Conv3dToLinear, LinearToConv3d
from flaxen.convert.ops.experts import (
    ErnieFuseAndSplitTextVisionExperts,
    ErnieSplitAndDecoupleTextVisionExperts,
)
from flaxen.convert.ops.modulelist import MergeModulelist, SplitModulelist
from flaxen.convert.ops.packing import MergeMessageQueries, UnpadVocab
from flaxen.convert.ops.rope import PermuteForRope
from flaxen.convert.ops.vision import VisionFuseAndPermuteForRope, VisionUnfuseAndPermuteForRope

__all__ = [
    "Chunk",
    "Concatenate",
    "Conv3dToLinear",
    "ConversionOps",
    "ErnieFuseAndSplitTextVisionExperts",
    "ErnieSplitAndDecoupleTextVisionExperts",
    "IdentityOp",
    "Interleave",
    "LinearToConv3d",
    "MergeMessageQueries",
    "MergeModulelist",
    "PermuteForRope",
    "Split",
    "SplitModulelist",
    "Tensors",
    "Transpose",
    "UnpadVocab",
    "VisionFuseAndPermuteForRope",
    "VisionUnfuseAndPermuteForRope",
]

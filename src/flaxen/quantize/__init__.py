"""Weights that stay packed in memory, and weights packed for writing."""

from flaxen.quantize.fp8 import quantize_fp8
from flaxen.quantize.keep import keeps, packed, packed_leaf, stored_settings, stored_tensors
from flaxen.quantize.leaf import QuantizedWeight

__all__ = [
    "QuantizedWeight",
    "keeps",
    "packed",
    "packed_leaf",
    "quantize_fp8",
    "stored_settings",
    "stored_tensors",
]

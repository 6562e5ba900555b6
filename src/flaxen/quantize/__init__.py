"""Weights that stay packed in memory, weights rounded to a few bits, and weights packed for
writing.
"""

from flaxen.quantize.fp8 import quantize_fp8
from flaxen.quantize.gptq import gptq_tensors, plain_tensor
from flaxen.quantize.keep import keeps, packed, packed_leaf, stored_settings, stored_tensors
from flaxen.quantize.leaf import QuantizedWeight
from flaxen.quantize.normal_float import NormalFloat
from flaxen.quantize.rounded import RoundedWeight
from flaxen.quantize.rounding import Rounding
from flaxen.quantize.rules import Rules, rounded, rounded_leaves

__all__ = [
    "NormalFloat",
    "QuantizedWeight",
    "RoundedWeight",
    "Rounding",
    "Rules",
    "gptq_tensors",
    "keeps",
    "packed",
    "packed_leaf",
    "plain_tensor",
    "quantize_fp8",
    "rounded",
    "rounded_leaves",
    "stored_settings",
    "stored_tensors",
]

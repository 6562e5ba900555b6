"""Inverse frequencies by `rope_type`.

A function takes the rope and the length of the text: a number, perhaps traced, or None before any
text was seen, and then computes with NumPy alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.registry import Registry

if TYPE_CHECKING:
    from flaxen.layers.rope import Rope

Frequencies = tuple[Any, float]
"""Inverse frequencies (dim / 2,) in float32, and the factor on cos and sin."""

Length = jax.Array | int | None

ROPE_TYPES: Registry[Callable[[Rope, Length], Frequencies]] = Registry("rope_type")


def default(r: Rope, length: Length) -> Frequencies:
    return r.base(), 1.0


def axial(r: Rope, length: Length) -> Frequencies:
    """A quarter as many frequencies as channels: rows and columns each turn half of the head."""
    return r.base(r.dim // 2), 1.0


def axial_in_turns(r: Rope, length: Length) -> Frequencies:
    """All frequencies of the head, every other one: the even ones of rows, then those of columns
    (Pixtral).
    """
    return np.concatenate([r.base()[::2], r.base()[1::2]]), 1.0


def linear(r: Rope, length: Length) -> Frequencies:
    return r.base() / np.float32(r["factor"]), 1.0


def proportional(r: Rope, length: Length) -> Frequencies:
    """Only the first pairs turn, as fast as they would if all did; the others stand still."""
    turning = int(r.get("partial_rotary_factor", 1.0) * r.dim // 2)
    inv = np.where(np.arange(r.dim // 2) < turning, r.base(), np.float32(0))
    return inv / np.float32(r.get("factor", 1.0)), 1.0


def dynamic(r: Rope, length: Length) -> Frequencies:
    """NTK-aware: the base grows with the length once that passes `max_positions`; no history is
    kept.
    """
    if length is None:
        return r.base(), 1.0
    longest = jnp.maximum(length, r.max_positions).astype(jnp.float32)
    grow = r["factor"] * longest / r.max_positions - (r["factor"] - 1)
    theta = r["rope_theta"] * grow ** (r.dim / (r.dim - 2))
    exponent = np.arange(0, r.dim, 2, dtype=np.float32) / np.float32(r.dim)
    return 1.0 / theta**exponent, 1.0


def llama3(r: Rope, length: Length) -> Frequencies:
    """Long waves are stretched by `factor`, short ones kept, and the ones between blended."""
    inv, low, high = r.base(), r["low_freq_factor"], r["high_freq_factor"]
    turns = r["original_max_position_embeddings"] * inv / (2 * math.pi)
    mix = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
    return (1 - mix) * inv / np.float32(r["factor"]) + mix * inv, 1.0


def yarn(r: Rope, length: Length) -> Frequencies:
    """YaRN (arXiv 2309.00071): interpolate by wave length, and sharpen attention by the length
    factor.
    """
    old = r["original_max_position_embeddings"]
    factor = r.get("factor", r.max_positions / old)

    def channel(turns: float) -> float:
        return r.dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(r["rope_theta"]))

    low, high = channel(r.get("beta_fast") or 32), channel(r.get("beta_slow") or 1)
    if r.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r.dim - 1)
    width = high - low or 0.001
    inv = r.base()
    ramp = np.clip((np.arange(len(inv)) - low) / width, 0, 1).astype(np.float32)
    return inv / np.float32(factor) * ramp + inv * (1 - ramp), _yarn_magnitude(r, factor)


def yarn_gain(factor: float, mscale: float = 1.0) -> float:
    """How much YaRN sharpens attention for texts that are `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_magnitude(r: Rope, factor: float) -> float:
    if r.get("attention_factor") is not None:
        return r["attention_factor"]
    if r.get("mscale") and r.get("mscale_all_dim"):
        return yarn_gain(factor, r["mscale"]) / yarn_gain(factor, r["mscale_all_dim"])
    return yarn_gain(factor)


def longrope(r: Rope, length: Length) -> Frequencies:
    """LongRoPE (arXiv 2402.13753): a factor for each channel, of two kinds: for texts that are no
    longer than those of pretraining, and for all positions of longer ones.
    """
    old = r["original_max_position_embeddings"]
    short, long = (r.base() / np.float32(r[f"{kind}_factor"]) for kind in ("short", "long"))
    inv = short if length is None else jnp.where(length > old, long, short)
    factor = r.get("factor", r.max_positions / old)
    gain = math.sqrt(1 + math.log(factor) / math.log(old)) if factor > 1 else 1.0
    return inv, r.get("attention_factor", gain)


for _kind in (default, axial, linear, proportional, dynamic, llama3, yarn, longrope):
    ROPE_TYPES.register(_kind.__name__, _kind)
ROPE_TYPES.register("mrope", default)
ROPE_TYPES.register("axial_in_turns", axial_in_turns)

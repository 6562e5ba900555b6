"""Scores that depend on how far apart two tokens stand, learned for ranges of distances
(arXiv 1910.10683).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import Call, Extras
from flaxen.core.dot import rows
from flaxen.core.errors import ConfigError
from flaxen.core.tree import module, param, static
from flaxen.layers.attention import Attention
from flaxen.layers.context import Context


@module
class RelativeBias:
    """One table for all layers: a number for each head and range of distances, seen both ways.

    Half of `ranges` are of keys before the query, half of keys after it; half of those hold one
    distance each, the others grow up to `reach`, and the last one holds all that is farther.
    """

    weight: Any
    ranges: static[int]
    reach: static[int] = 128

    def __post_init__(self) -> None:
        _check(self.ranges, self.ranges // 4, self.reach)

    def __call__(self, length: int) -> jax.Array:
        """What is added to the scores of queries and keys: (1, N, T, T)."""
        slots = np.arange(length)
        buckets = both_ways(slots[None, :] - slots[:, None], self.ranges, self.reach)
        return jnp.moveaxis(rows(self.weight, jnp.asarray(buckets)), -1, 0)[None]


def _check(ranges: int, alone: int, reach: int) -> None:
    """
    Raises:
        ConfigError: no range that is one distance, or none that is several.
    """
    if alone < 1 or reach <= alone:
        raise ConfigError(
            f"relative_attention_num_buckets={ranges} and relative_attention_max_distance={reach}; "
            "expected 4 buckets or more, and a distance of more than half as many. Correct them."
        )


def both_ways(distance: np.ndarray, ranges: int, reach: int) -> np.ndarray:
    """Which range a distance (key minus query) is in."""
    side = ranges // 2
    return backwards(np.abs(distance), side, reach) + side * (distance > 0)


def backwards(far: np.ndarray, ranges: int, reach: int) -> np.ndarray:
    """Which range a distance is in, from 0 on."""
    exact = ranges // 2
    # In float32, as the reference counts: the logarithm decides at the borders.
    grown = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact))
    grown = grown / np.float32(math.log(reach / exact)) * np.float32(ranges - exact)
    coarse = np.minimum(exact + grown.astype(np.int32), ranges - 1)
    return np.where(far < exact, far, coarse)


@module
class PastBias:
    """The same for layers that see the past only: half of `ranges` hold one distance each."""

    weight: Any
    ranges: static[int]
    reach: static[int] = 128

    def __post_init__(self) -> None:
        _check(self.ranges, self.ranges // 2, self.reach)

    def __call__(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """What is added to the scores of queries and keys at these slots, (T,) and (S,) or (B, T)
        and (B, S): (1 or B, N, T, S).
        """
        table = jnp.asarray(backwards(np.arange(self.reach + 1), self.ranges, self.reach))
        back = jnp.clip(queries[..., :, None] - keys[..., None, :], 0, self.reach)
        bias = jnp.moveaxis(rows(self.weight, table[back]), -1, -3)
        return bias if bias.ndim == 4 else bias[None]


@module
class BiasedAttention(Attention):
    """Attention that adds the context's bias to its scores."""

    def extras(self, ctx: Context) -> Extras:
        return dataclasses.replace(super().extras(ctx), bias=ctx.bias)

    def call(self, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Context) -> Call:
        return dataclasses.replace(super().call(q, k, v, ctx), bias=True)


@module
class OwnBiasAttention(Attention):
    """Attention with a bias of its own."""

    position_bias: RelativeBias | PastBias

    def extras(self, ctx: Context) -> Extras:
        scene, table = ctx.scene, self.position_bias
        ends = scene.q_slots, scene.k_slots
        bias = table(*ends) if isinstance(table, PastBias) else table(ends[0].shape[-1])
        return dataclasses.replace(super().extras(ctx), bias=bias)

    def call(self, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Context) -> Call:
        return dataclasses.replace(super().call(q, k, v, ctx), bias=True)


def relative_bias(buckets: int, heads: int, ranges: int = 32) -> RelativeBias:
    return RelativeBias(weight=param(buckets=buckets, heads=heads), ranges=ranges)

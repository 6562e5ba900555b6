"""Attention with a gate on its output."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from flaxen.cache import KeysValues
from flaxen.core.tree import module
from flaxen.layers.attention import Attention
from flaxen.layers.context import Context
from flaxen.layers.linear import Linear


@module
class GatedAttention(Attention):
    """What the heads give is multiplied by sigmoid(gate_proj(x)), channel by channel, before it is
    projected.
    """

    gate_proj: Linear

    def __call__(
        self, x: jax.Array, ctx: Context, cache: KeysValues | None = None
    ) -> tuple[jax.Array, KeysValues | None]:
        """x (B, T, D) -> (B, T, D), and the cache with the new keys in it."""
        gated = Gated(proj=self.o_proj, gate=jax.nn.sigmoid(self.gate_proj(x)))
        return Attention.__call__(dataclasses.replace(self, o_proj=gated), x, ctx, cache)


@module
class Gated:
    """proj(gate * y)."""

    proj: Any
    gate: jax.Array

    def __call__(self, y: jax.Array) -> jax.Array:
        return self.proj(y * self.gate)


def gated_attention(attention: Attention) -> GatedAttention:
    """The same with a gate, which is as its queries are projected."""
    slots = {f.name: getattr(attention, f.name) for f in dataclasses.fields(attention)}
    return GatedAttention(**slots, gate_proj=attention.q_proj)

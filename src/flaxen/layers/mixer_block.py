"""Layers of hybrids that are built in another way than `Block`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, static
from flaxen.layers.chunked_mlp import feed_forward
from flaxen.layers.context import Context


@module
class MixerBlock:
    """x + mixer(norm(x)): the mixer does the work of a feed-forward network, too."""

    mixer: Any
    input_layernorm: Any

    @property
    def self_attn(self) -> Any:
        """What has a cache, as in other blocks."""
        return self.mixer

    def __call__(self, x: jax.Array, ctx: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """x (B, T, D) -> (B, T, D), and this layer's cache."""
        y, cache = self.mixer(self.input_layernorm(x), ctx, cache)
        x = x + y
        if ctx.runtime.constrain_blocks:
            x = ctx.runtime.constrain(x, "batch", "seq", "embed")
        return x, cache


@module
class WeighedBlock:
    """Each sublayer is a h + b f(h), h = norm(x): the stream itself is normalised. attn and ffn: a
    and b of the two.
    """

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    pre_feedforward_layernorm: Any
    attn: static[tuple[float, float]]
    ffn: static[tuple[float, float]]

    def __call__(self, x: jax.Array, ctx: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """x (B, T, D) -> (B, T, D), and this layer's cache."""
        h = self.input_layernorm(x)
        y, cache = self.self_attn(h, ctx, cache)
        h = self.pre_feedforward_layernorm(_weighed(h, y, self.attn))
        x = _weighed(h, feed_forward(self.mlp, h, ctx), self.ffn)
        if ctx.runtime.constrain_blocks:
            x = ctx.runtime.constrain(x, "batch", "seq", "embed")
        return x, cache

    def attentions(self, x: jax.Array, ctx: Context) -> jax.Array:
        """What each head looks at when the block is given x (B, T, D): (B, N, T, T)."""
        return self.self_attn.weights(self.input_layernorm(x), ctx)


def _weighed(h: jax.Array, y: jax.Array, factors: tuple[float, float]) -> jax.Array:
    a, b = (jnp.asarray(factor, h.dtype) for factor in factors)
    return a * h + b * y

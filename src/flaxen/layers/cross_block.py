"""Layers of a decoder that looks at an encoder: norms before each sublayer, or after it.

A layer's cache is a pair: what it remembers of its own tokens, and keys and values of the
encoder's, which the first call makes and all others read.
"""

from __future__ import annotations

from typing import Any

import jax

from flaxen.cache import KeysValues
from flaxen.core.tree import module, static
from flaxen.layers.chunked_mlp import feed_forward
from flaxen.layers.context import Context
from flaxen.layers.cross_attention import CrossAttention
from flaxen.layers.dropout import dropout

Pair = tuple[KeysValues, Any]


class Crossing:
    """What both kinds share: sublayers, and the two halves of a cache."""

    self_attn: Any
    cross_attn: CrossAttention
    mlp: Any
    dropout: static[float]

    def halves(self, ctx: Context, cache: Pair | None) -> tuple[Any, Any]:
        """The cache of the layer's own tokens, and that of the encoder's."""
        if cache is None:
            return None, None
        own, other = cache
        return own, self.cross_attn.crossed(ctx, own.codec) if other is None else other

    def drop(self, x: jax.Array, ctx: Context, place: int) -> jax.Array:
        return dropout(x, self.dropout, ctx.of_layer(place).dropout_key)


@module
class CrossBlock(Crossing):
    """Each sublayer is x + f(norm(x)). `dropout` is of what each adds to the stream."""

    self_attn: Any
    cross_attn: CrossAttention
    mlp: Any
    input_layernorm: Any
    cross_attention_layernorm: Any
    pre_feedforward_layernorm: Any
    dropout: static[float] = 0.0

    def __call__(self, x: jax.Array, ctx: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """x (B, T, D) -> (B, T, D), and this layer's cache."""
        own, other = self.halves(ctx, cache)
        y, own = self.self_attn(self.input_layernorm(x), ctx, own)
        x = x + self.drop(y, ctx, 1)
        y, _ = self.cross_attn(self.cross_attention_layernorm(x), ctx.of_layer(5), other)
        x = x + self.drop(y, ctx, 2)
        y = feed_forward(self.mlp, self.pre_feedforward_layernorm(x), ctx)
        x = x + self.drop(y, ctx, 6)
        if ctx.runtime.constrain_blocks:
            x = ctx.runtime.constrain(x, "batch", "seq", "embed")
        return x, None if cache is None else (own, other)

    def attentions(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """What each head looks at when the block is given x (B, T, D): (B, N, T, T) of its own
        tokens, (B, N, T, S) of the encoder's.
        """
        x = self.input_layernorm(h := x)
        h = h + self.self_attn(x, ctx)[0]
        others = self.cross_attn.weights(self.cross_attention_layernorm(h), ctx)
        return self.self_attn.weights(x, ctx), others


@module
class PostNormCrossBlock(Crossing):
    """Each sublayer is norm(x + f(x)). `dropout` is of what each adds to the stream."""

    self_attn: Any
    cross_attn: CrossAttention
    mlp: Any
    post_attention_layernorm: Any
    post_cross_attention_layernorm: Any
    post_feedforward_layernorm: Any
    dropout: static[float] = 0.0

    def __call__(self, x: jax.Array, ctx: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """x (B, T, D) -> (B, T, D), and this layer's cache."""
        own, other = self.halves(ctx, cache)
        y, own = self.self_attn(x, ctx, own)
        x = self.post_attention_layernorm(x + self.drop(y, ctx, 1))
        y, _ = self.cross_attn(x, ctx.of_layer(5), other)
        x = self.post_cross_attention_layernorm(x + self.drop(y, ctx, 2))
        y = feed_forward(self.mlp, x, ctx)
        x = self.post_feedforward_layernorm(x + self.drop(y, ctx, 6))
        if ctx.runtime.constrain_blocks:
            x = ctx.runtime.constrain(x, "batch", "seq", "embed")
        return x, None if cache is None else (own, other)

    def attentions(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """As `CrossBlock.attentions`."""
        h = self.post_attention_layernorm(x + self.self_attn(x, ctx)[0])
        return self.self_attn.weights(x, ctx), self.cross_attn.weights(h, ctx)

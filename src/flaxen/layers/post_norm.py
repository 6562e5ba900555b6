"""A layer of the original Transformer, as most encoders have it."""

from __future__ import annotations

from typing import Any

import jax

from flaxen.core.tree import module, static
from flaxen.layers.block import laid_out
from flaxen.layers.chunked_mlp import feed_forward
from flaxen.layers.context import Context
from flaxen.layers.dropout import dropout


@module
class PostNormBlock:
    """Each sublayer is norm(x + f(x)). Dropout is of what each adds to the stream."""

    self_attn: Any
    mlp: Any
    post_attention_layernorm: Any
    post_feedforward_layernorm: Any
    attn_dropout: static[float] = 0.0
    mlp_dropout: static[float] = 0.0

    def __call__(self, x: jax.Array, ctx: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """x (B, T, D) -> (B, T, D), and this layer's cache."""
        y, cache = self.self_attn(x, ctx, cache)
        y = dropout(y, self.attn_dropout, ctx.of_layer(1).dropout_key)
        x = self.post_attention_layernorm(x + y)
        y = feed_forward(self.mlp, x, ctx)
        y = dropout(y, self.mlp_dropout, ctx.of_layer(2).dropout_key)
        return laid_out(self.post_feedforward_layernorm(x + y), ctx), cache

    def attentions(self, x: jax.Array, ctx: Context) -> jax.Array:
        """What each head looks at when the block is given x (B, T, D): (B, N, T, T)."""
        return self.self_attn.weights(x, ctx)

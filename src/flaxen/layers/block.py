"""One layer of a decoder."""

from __future__ import annotations

from typing import Any

import jax

from flaxen.core.tree import module, static
from flaxen.layers.chunked_mlp import feed_forward
from flaxen.layers.context import Context
from flaxen.layers.dropout import dropout
from flaxen.layers.norm import Identity


@module
class Block:
    """Each sublayer is x + post(f(pre(x))); a slot without a norm is the identity.
    `dropout` is of what each adds to the stream.
    """

    self_attn: Any
    mlp: Any
    input_layernorm: Any = Identity()
    post_attention_layernorm: Any = Identity()
    pre_feedforward_layernorm: Any = Identity()
    post_feedforward_layernorm: Any = Identity()
    dropout: static[float] = 0.0

    def __call__(self, x: jax.Array, ctx: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """x (B, T, D) -> (B, T, D), and this layer's cache."""
        y, cache = self.self_attn(self.input_layernorm(x), ctx, cache)
        keys = [ctx.of_layer(i).dropout_key for i in (1, 2)]
        x = x + dropout(self.post_attention_layernorm(y), self.dropout, keys[0])
        y = feed_forward(self.mlp, self.pre_feedforward_layernorm(x), ctx)
        x = x + dropout(self.post_feedforward_layernorm(y), self.dropout, keys[1])
        if ctx.runtime.constrain_blocks:
            x = ctx.runtime.constrain(x, "batch", "seq", "embed")
        return x, cache

    def attentions(self, x: jax.Array, ctx: Context) -> jax.Array:
        """What each head looks at when the block is given x (B, T, D): (B, N, T, T)."""
        return self.self_attn.weights(self.input_layernorm(x), ctx)

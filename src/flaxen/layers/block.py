"""One layer of a decoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from flaxen.core.tree import module, static
from flaxen.layers.chunked_mlp import feed_forward
from flaxen.layers.context import Context
from flaxen.layers.dropout import dropout
from flaxen.layers.norm import Identity

Drop = Callable[[jax.Array], jax.Array]


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
        drop = drops(self.dropout, ctx)
        y, cache = self.self_attn(self.input_layernorm(x), ctx, cache)
        x = x + drop[0](self.post_attention_layernorm(y))
        y = feed_forward(self.mlp, self.pre_feedforward_layernorm(x), ctx)
        return laid_out(x + drop[1](self.post_feedforward_layernorm(y)), ctx), cache

    def attentions(self, x: jax.Array, ctx: Context) -> jax.Array:
        """What each head looks at when the block is given x (B, T, D): (B, N, T, T)."""
        return self.self_attn.weights(self.input_layernorm(x), ctx)


@module
class ParallelBlock:
    """x + attn(n_a(h)) + mlp(n_m(h)), h = input_layernorm(x): both sublayers read the same, after
    one norm that they share or one for each; a slot without a norm is the identity.
    """

    self_attn: Any
    mlp: Any
    input_layernorm: Any = Identity()
    attn_layernorm: Any = Identity()
    mlp_layernorm: Any = Identity()
    dropout: static[float] = 0.0

    def __call__(self, x: jax.Array, ctx: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """x (B, T, D) -> (B, T, D), and this layer's cache."""
        drop = drops(self.dropout, ctx)
        h = self.input_layernorm(x)
        y, cache = self.self_attn(self.attn_layernorm(h), ctx, cache)
        z = feed_forward(self.mlp, self.mlp_layernorm(h), ctx)
        return laid_out(x + drop[0](y) + drop[1](z), ctx), cache

    def attentions(self, x: jax.Array, ctx: Context) -> jax.Array:
        """As `Block.attentions`."""
        return self.self_attn.weights(self.attn_layernorm(self.input_layernorm(x)), ctx)


@module
class NormedStreamBlock:
    """Each sublayer is h + f(h), h = norm(x): the stream itself is normalised (some Bloom)."""

    self_attn: Any
    mlp: Any
    input_layernorm: Any
    pre_feedforward_layernorm: Any
    dropout: static[float] = 0.0

    def __call__(self, x: jax.Array, ctx: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """x (B, T, D) -> (B, T, D), and this layer's cache."""
        drop = drops(self.dropout, ctx)
        h = self.input_layernorm(x)
        y, cache = self.self_attn(h, ctx, cache)
        h = self.pre_feedforward_layernorm(h + drop[0](y))
        return laid_out(h + drop[1](feed_forward(self.mlp, h, ctx)), ctx), cache

    def attentions(self, x: jax.Array, ctx: Context) -> jax.Array:
        """As `Block.attentions`."""
        return self.self_attn.weights(self.input_layernorm(x), ctx)


def drops(rate: float, ctx: Context) -> tuple[Drop, Drop]:
    """Dropout for what each of two sublayers adds to the stream, each with its own randomness."""
    first, second = (ctx.of_layer(i).dropout_key for i in (1, 2))
    return partial(dropout, rate=rate, key=first), partial(dropout, rate=rate, key=second)


def laid_out(x: jax.Array, ctx: Context) -> jax.Array:
    """The stream after a block, as the plan says if the runtime asks for it."""
    constrained = ctx.runtime.constrain_blocks
    return ctx.runtime.constrain(x, "batch", "seq", "embed") if constrained else x

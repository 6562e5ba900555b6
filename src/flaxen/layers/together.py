"""Attention in which the tokens of one picture see each other."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from flaxen.attention import Call, Extras, Mask
from flaxen.attention.call import visible
from flaxen.core.tree import module
from flaxen.layers.attention import Attention
from flaxen.layers.context import Context


@module
class TogetherAttention(Attention):
    """A query sees the past, and where the context's bias (B, 1, T, T) is True; of both no more
    than a window holds. The whole mask becomes a bias then: mechanisms know no such one.
    """

    def extras(self, ctx: Context) -> Extras:
        extras = super().extras(ctx)
        if ctx.bias is None:
            return extras
        see = visible(dataclasses.replace(self.mask, window=None), ctx.scene)[:, None] | ctx.bias
        if self.mask.window:
            q, k = ctx.scene.q_slots[..., :, None], ctx.scene.k_slots[..., None, :]
            see = see & (q - k < self.mask.window)
        return dataclasses.replace(extras, bias=jnp.where(see, 0.0, -jnp.inf))

    def call(self, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Context) -> Call:
        call = super().call(q, k, v, ctx)
        if ctx.bias is None:
            return call
        return dataclasses.replace(call, mask=Mask(causal=False), bias=True)

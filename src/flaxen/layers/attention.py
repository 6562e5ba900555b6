"""Self-attention with grouped key and value heads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import Call, Extras, Mask, choose, vanilla
from flaxen.cache import KeysValues, Order, keys_and_values
from flaxen.core.platform import platform
from flaxen.core.tree import module, static
from flaxen.layers.context import Context
from flaxen.layers.linear import Linear, linear
from flaxen.layers.norm import Identity
from flaxen.layers.rope import Rope, rotate


@module
class Attention:
    """q_norm and k_norm work on single heads, before the rotation. sinks: (heads,), a weight;
    slopes: ALiBi, one for each head; dropout: how much is dropped where the context has a key.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: Any = Identity()
    k_norm: Any = Identity()
    sinks: Any = None
    rope: static[Rope | None] = None
    mask: static[Mask] = Mask()
    scale: static[float]
    softcap: static[float | None] = None
    slopes: static[tuple[float, ...] | None] = None
    dropout: static[float] = 0.0

    def __call__(
        self, x: jax.Array, ctx: Context, cache: KeysValues | None = None
    ) -> tuple[jax.Array, KeysValues | None]:
        """x (B, T, D) -> (B, T, D), and the cache with the new keys in it."""
        q, k, v = self.projected(x, ctx)
        if cache is not None and ctx.at is not None:
            cache, k, v, scene = cache.remember(k, v, ctx.at, ctx.scene)
            ctx = dataclasses.replace(ctx, scene=scene)
        call = self.call(q, k, v, ctx)
        y = choose(call).attend(q, k, v, call, ctx.scene, self.extras(ctx))
        y = ctx.runtime.constrain(y, "batch", "seq", "heads", "head_dim")
        return self.o_proj(y), cache

    def projected(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of x, normed and rotated: (B, T, N or K, H)."""
        lay = lambda y, heads: ctx.runtime.constrain(y, "batch", "seq", heads, "head_dim")
        q = lay(self.q_norm(self.q_proj(x)), "heads")
        k = lay(self.k_norm(self.k_proj(x)), "kv_heads")
        v = lay(self.v_proj(x), "kv_heads")
        if self.rope is not None:
            cos, sin = ctx.rotation(self.rope)
            q, k = (rotate(y, cos, sin, self.rope.interleaved) for y in (q, k))
        return q, k, v

    def weights(self, x: jax.Array, ctx: Context) -> jax.Array:
        """What each query head looks at, (B, N, T, T), whatever the mechanism."""
        q, k, v = self.projected(x, ctx)
        return vanilla.weights(q, k, self.call(q, k, v, ctx), ctx.scene, self.extras(ctx))

    def extras(self, ctx: Context) -> Extras:
        """What this layer adds to its scores."""
        slopes = None if self.slopes is None else jnp.array(self.slopes, jnp.float32)
        key = ctx.dropout_key if self.dropout else None
        return Extras(slopes=slopes, sinks=self.sinks, dropout_key=key)

    def cache(self, order: Order) -> KeysValues:
        """The shapes of what this layer remembers."""
        k, v = (x.weight.shape for x in (self.k_proj, self.v_proj))
        mask = self.mask
        window = None if mask.prefix else mask.window or mask.chunk
        return keys_and_values(order, k[-3], k[-2], v[-2], window)

    def call(self, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Context) -> Call:
        """This layer's attention as a description."""
        return Call(
            mask=self.mask,
            scale=self.scale,
            queries=q.shape[1],
            keys=k.shape[1],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            v_head_dim=v.shape[3],
            dtype=str(q.dtype),
            platform=platform(),
            aligned=ctx.scene.aligned,
            softcap=self.softcap,
            dropout=0.0 if ctx.dropout_key is None else self.dropout,
            padded=ctx.scene.keep is not None,
            packed=ctx.scene.q_segments is not None,
            alibi=self.slopes is not None,
            sinks=self.sinks is not None,
            placement=ctx.runtime.placement,
            settings=ctx.runtime.attention,
        )


def attention(
    *,
    embed: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    bias: bool = False,
    out_bias: bool | None = None,
    scale: float | None = None,
    **slots: Any,
) -> Attention:
    """Attention by sizes; `slots` are the other fields. `out_bias` follows `bias` unless given."""
    D = {"embed": embed}
    Q, K = {"heads": heads, "head_dim": head_dim}, {"kv_heads": kv_heads, "head_dim": head_dim}
    return Attention(
        q_proj=linear(D, Q, bias=bias),
        k_proj=linear(D, K, bias=bias),
        v_proj=linear(D, K, bias=bias),
        o_proj=linear(Q, D, bias=bias if out_bias is None else out_bias),
        scale=head_dim**-0.5 if scale is None else scale,
        **slots,
    )

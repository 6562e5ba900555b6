"""Self-attention with grouped key and value heads."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import Call, Extras, Mask, choose, vanilla
from flaxen.cache import KeysValues, Order, keys_and_values
from flaxen.core.checks import divides
from flaxen.core.platform import platform
from flaxen.core.tree import module, static
from flaxen.layers.context import Context
from flaxen.layers.linear import Linear, linear
from flaxen.layers.norm import Identity
from flaxen.layers.rope import Rope, rotate


class Attends:
    """What looks at other tokens: a rope, a mask, and its attention as a description."""

    o_proj: Linear
    rope: Any
    mask: static[Mask]
    scale: static[float]
    dropout: static[float]
    sinks: Any = None
    softcap: static[float | None] = None
    slopes: static[tuple[float, ...] | None] = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Heads, key heads, channels of a key and of a value, as whole sequences have them."""
        raise NotImplementedError

    @property
    def remembers(self) -> int:
        """How many numbers a token leaves behind in a cache, in all stacked layers together."""
        raise NotImplementedError

    def projected(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of x, normed and rotated: (B, T, N or K, H)."""
        raise NotImplementedError

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, ctx: Context) -> jax.Array:
        """What the queries take of the values, (B, T, N, H), by the mechanism that suits best."""
        call = self.call(q, k, v, ctx)
        y = choose(call).attend(q, k, v, call, ctx.scene, self.extras(ctx))
        return ctx.runtime.constrain(y, "batch", "seq", "heads", "head_dim")

    def weights(self, x: jax.Array, ctx: Context) -> jax.Array:
        """What each query head looks at, (B, N, T, T), whatever the mechanism."""
        q, k, v = self.projected(x, ctx)
        return vanilla.weights(q, k, self.call(q, k, v, ctx), ctx.scene, self.extras(ctx))

    def extras(self, ctx: Context) -> Extras:
        """What this layer adds to its scores."""
        slopes = None if self.slopes is None else jnp.array(self.slopes, jnp.float32)
        key = ctx.dropout_key if self.dropout else None
        return Extras(slopes=slopes, sinks=self.sinks, dropout_key=key)

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


@module
class Attention(Attends):
    """q_norm, k_norm and v_norm see (B, T, heads, H), before the rotation. sinks: (heads,), a
    weight; slopes: ALiBi, one for each head; dropout: how much is dropped where the context has a
    key.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: Any = Identity()
    k_norm: Any = Identity()
    v_norm: Any = Identity()
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
        return self.o_proj(self.attend(q, k, v, ctx)), cache

    def projected(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        lay = lambda y, heads: ctx.runtime.constrain(y, "batch", "seq", heads, "head_dim")
        q, k = lay(self.q_proj(x), "heads"), lay(self.k_proj(x), "kv_heads")
        return *self.placed(q, k, ctx), lay(self.v_norm(self.v_proj(x)), "kv_heads")

    def placed(self, q: jax.Array, k: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Queries and keys, normed, that know where they stand."""
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is None:
            return q, k
        return rotated(q, ctx, self.rope), rotated(k, ctx, self.rope)

    def cache(self, order: Order) -> KeysValues:
        """The shapes of what this layer remembers."""
        _, heads, head_dim, v_head_dim = self.sizes
        mask = self.mask
        window = None if mask.prefix else mask.window or mask.chunk
        return keys_and_values(order, heads, head_dim, v_head_dim, window)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        q, k, v = (p.weight.shape for p in (self.q_proj, self.k_proj, self.v_proj))
        return q[-3], k[-3], k[-2], v[-2]

    @property
    def remembers(self) -> int:
        return sum(math.prod(p.weight.shape[:-1]) for p in (self.k_proj, self.v_proj))


def rotated(x: jax.Array, ctx: Context, rope: Rope) -> jax.Array:
    """x (B, T, heads, H), turned by where its tokens stand."""
    cos, sin = ctx.rotation(rope)
    return rotate(x, cos, sin, rope.interleaved)


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
    """Attention by sizes; `slots` are the other fields. `out_bias` follows `bias` unless given.

    Raises:
        ConfigError: query heads that cannot be shared evenly among the key heads.
    """
    divides("key heads", kv_heads, "query heads", heads)
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

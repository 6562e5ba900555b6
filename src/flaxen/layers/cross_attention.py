"""Attention to another sequence: queries of one, keys and values of the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from flaxen.attention import Mask, choose, vanilla
from flaxen.cache import Codec, Crossed
from flaxen.core.tree import module, static
from flaxen.layers.attention import Attention, attention
from flaxen.layers.context import Context


@module
class CrossAttention(Attention):
    """Attention whose keys and values are made of the context's `memory`."""

    mask: static[Mask] = Mask(causal=False)

    def __call__(  # type: ignore[override]
        self, x: jax.Array, ctx: Context, cache: Crossed | None = None
    ) -> tuple[jax.Array, Crossed | None]:
        """x (B, T, D) -> (B, T, D); `cache` holds what `crossed` made of the memory."""
        q, k, v, ctx = self._queries_and_keys(x, ctx, cache)
        call = self.call(q, k, v, ctx)
        y = choose(call).attend(q, k, v, call, ctx.scene, self.extras(ctx))
        y = ctx.runtime.constrain(y, "batch", "seq", "heads", "head_dim")
        return self.o_proj(y), cache

    def crossed(self, ctx: Context, codec: Codec) -> Crossed:
        """Keys and values of the memory, to be looked at again and again."""
        return Crossed.of(*self._keys(ctx), codec)

    def weights(self, x: jax.Array, ctx: Context) -> jax.Array:
        """What each query head looks at, (B, N, T, S), whatever the mechanism."""
        q, k, v, ctx = self._queries_and_keys(x, ctx, None)
        return vanilla.weights(q, k, self.call(q, k, v, ctx), ctx.scene, self.extras(ctx))

    def _queries_and_keys(
        self, x: jax.Array, ctx: Context, cache: Crossed | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, Context]:
        """Queries of x, keys and values of the memory, and a context of where these stand."""
        assert ctx.memory is not None
        q = ctx.runtime.constrain(self.q_proj(x), "batch", "seq", "heads", "head_dim")
        k, v = self._keys(ctx) if cache is None else cache.read(None, q.dtype)
        return q, k, v, dataclasses.replace(ctx, scene=ctx.memory.scene)

    def _keys(self, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """Keys and values of the memory, (B, S, K, H)."""
        assert ctx.memory is not None and ctx.memory.states is not None
        made = (project(ctx.memory.states) for project in (self.k_proj, self.v_proj))
        k, v = (ctx.runtime.constrain(y, "batch", "seq", "kv_heads", "head_dim") for y in made)
        return k, v


def cross_attention(**sizes: Any) -> CrossAttention:
    """Cross attention by the arguments of `attention`."""
    part = attention(**sizes)
    fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.name != "mask"}
    return CrossAttention(**fields)

"""Gradients of blockwise attention, tile by tile from the saved denominators.

B batch, K kv_heads, G group, T queries, S keys, H head_dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import online
from flaxen.attention.call import Call, Extras
from flaxen.attention.tiles import Tile, cut, over_keys, over_queries
from flaxen.core.dot import arithmetic


def gradients(call: Call, saved: Any, grad: jax.Array) -> tuple[Any, ...]:
    """Of q, k, v and the extras; saved: these, the scene, the result and its denominators."""
    q, k, v, extras, scene, out, lse = saved
    dtypes, wide = (q.dtype, k.dtype, v.dtype), lse.dtype
    mean = online.weighted_mean(out, grad.astype(wide))
    q, k, v, grad = (x.astype(arithmetic(x.dtype)) for x in (q, k, v, grad))
    differentiable = dataclasses.replace(extras, dropout_key=None)
    zeros = lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, wide))

    def block(carry: Any, first: Any, count: int) -> Any:
        mine = [cut(x, first, count, 3) for x in (q, grad, lse, mean)]

        def more(now: Any, tile: Tile) -> Any:
            (dk, dv, dextras), dq = now
            step_q, step_k, step_v, ds = online.block_gradients(
                mine[0],
                cut(k, tile.k, tile.keys, 2),
                cut(v, tile.k, tile.keys, 2),
                *mine[1:],
                tile.terms(call, scene, extras),
                scale=call.scale,
                softcap=call.softcap,
                kept=tile.kept(call, extras, q.shape[0]),
            )
            dk, dv = _add(dk, step_k, tile.k), _add(dv, step_v, tile.k)
            dextras = _of_extras(dextras, ds, online.distance(tile.scene(scene)), tile)
            return (dk, dv, dextras), dq + step_q

        start = carry, jnp.zeros(mine[0].shape, wide)
        return over_keys(call, more, start, first, count)

    carry = zeros(k), zeros(v), jax.tree.map(zeros, differentiable)
    (dk, dv, dextras), dq = over_queries(call, block, carry)
    if extras.sinks is not None:
        sinks = online.sink_gradients(extras.sinks, lse, mean)
        dextras = dataclasses.replace(dextras, sinks=sinks)
    dextras = jax.tree.map(lambda x, like: x.astype(like.dtype), dextras, differentiable)
    return *(x.astype(d) for x, d in zip((dq, dk, dv), dtypes, strict=True)), dextras, None


def _add(total: jax.Array, part: jax.Array, at: Any) -> jax.Array:
    """Add to some keys of (B, K, S, H)."""
    now = cut(total, at, part.shape[2], 2)
    return jax.lax.dynamic_update_slice_in_dim(total, now + part, at, 2)


def _of_extras(now: Extras, ds: jax.Array, distance: jax.Array, tile: Tile) -> Extras:
    """The gradients of bias and slopes with those of one tile's scores, ds (B, K, G, T, S)."""
    heads = ds.reshape(ds.shape[0], -1, *ds.shape[3:])
    if now.slopes is not None:
        slopes = now.slopes - jnp.sum(heads * distance, axis=(0, 2, 3))
        now = dataclasses.replace(now, slopes=slopes)
    if now.bias is not None:
        once = tuple(axis for axis in (0, 1) if now.bias.shape[axis] == 1)
        part = jnp.sum(heads, axis=once, keepdims=True)
        bias = jax.lax.dynamic_update_slice(now.bias, part, (0, 0, tile.q, tile.k))
        now = dataclasses.replace(now, bias=bias)
    return now

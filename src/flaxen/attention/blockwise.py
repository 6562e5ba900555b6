"""Exact attention in memory that grows with the length, not with its square.

Blocks of queries, one after another; hidden halves are never computed. What is large is computed
again in the backward pass, from the denominators of the softmax.

B batch, K kv_heads, G group, T queries, S keys, H head_dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import online
from flaxen.attention.blockwise_backward import gradients
from flaxen.attention.call import NOTHING, Call, Extras, Scene, without_unseen
from flaxen.attention.choose import Mechanism, register
from flaxen.attention.shards import per_shard
from flaxen.attention.tiles import Tile, cut, looped, over_keys, over_queries, padded, query_block
from flaxen.core.dot import arithmetic


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    """Each device works on its own rows, heads and queries."""
    return per_shard(local, q, k, v, call, scene, extras)


def local(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    """The same on one device."""
    length = q.shape[1]
    k, v = without_unseen(k, v, call.mask, scene)
    if looped(call):
        q, k, v, call, scene, extras = _whole_blocks(q, k, v, call, scene, extras)
    major = (jnp.swapaxes(x, 1, 2) for x in (k, v))
    attend = _recomputing if looped(call) else _remembering
    out = attend(call, online.grouped(q, call.kv_heads), *major, extras, scene)
    return online.flat(out)[:, :length]


def _remembering(
    call: Call, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, scene: Scene
) -> jax.Array:
    """q: (B, K, G, T, H), k: (B, K, S, H), v: (B, K, S, Hv) -> (B, K, G, T, Hv)."""
    return _forward(call, q, k, v, extras, scene)[0]


_recomputing = jax.custom_vjp(_remembering, nondiff_argnums=(0,))


def _forward(
    call: Call, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, scene: Scene
) -> tuple[jax.Array, Any]:
    inputs, dtype = (q, k, v, extras, scene), v.dtype
    q, k, v = (x.astype(arithmetic(x.dtype)) for x in (q, k, v))

    def block(carry: None, first: Any, count: int) -> Any:
        mine = cut(q, first, count, 3)

        def more(now: online.Running, tile: Tile) -> online.Running:
            return online.step(
                now,
                mine,
                cut(k, tile.k, tile.keys, 2),
                cut(v, tile.k, tile.keys, 2),
                tile.terms(call, scene, extras),
                scale=call.scale,
                softcap=call.softcap,
                kept=tile.kept(call, extras, q.shape[0]),
            )

        seen = over_keys(call, more, online.start(mine, v.shape[3]), first, count)
        out, lse = online.finish(seen, extras.sinks)
        return carry, (out.astype(dtype), lse)

    _, (out, lse) = over_queries(call, block, None)
    return out, (*inputs, out, lse)


_recomputing.defvjp(_forward, gradients)


def _whole_blocks(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras
) -> tuple[jax.Array, jax.Array, jax.Array, Call, Scene, Extras]:
    """Lengths that divide into blocks: more queries, whose results nobody reads, and more keys,
    which nobody sees.
    """
    block = call.settings.blocks.k
    queries = lambda x, axis: padded(x, query_block(call), axis)
    keys = lambda x, axis: padded(x, block, axis)
    keep = jnp.ones((1, call.keys), bool) if scene.keep is None else scene.keep
    scene = dataclasses.replace(
        scene,
        q_slots=queries(scene.q_slots, -1),
        k_slots=keys(scene.k_slots, -1),
        keep=scene.keep if call.keys % block == 0 else keys(keep, 1),
        q_segments=queries(scene.q_segments, 1),
        k_segments=keys(scene.k_segments, 1),
    )
    extras = dataclasses.replace(extras, bias=keys(queries(extras.bias, 2), 3))
    q, k, v = queries(q, 1), keys(k, 1), keys(v, 1)
    return q, k, v, dataclasses.replace(call, queries=q.shape[1], keys=k.shape[1]), scene, extras


register(
    Mechanism(
        "blockwise",
        attend,
        refuse=lambda call: None,
        prefer=lambda call: 3 if call.platform == "cpu" else 1,
    )
)

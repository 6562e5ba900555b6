"""Ring attention: queries stay on their device, keys and values turn around one mesh axis.

What is visible comes from slots that travel with the keys, so that any order of the sequence works.
On one device it is a ring of one: the same tiles without a neighbour.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from flaxen.attention.call import NOTHING, Call, Extras, Scene
from flaxen.attention.choose import Mechanism, register
from flaxen.attention.ring_layout import Ring, exchanged, filled, plan, ring_size
from flaxen.attention.ring_turn import around
from flaxen.attention.shards import per_shard, query_spec
from flaxen.shard.specs import mesh_axes


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    """All devices of `call.settings.axis` are asked, one after another."""
    return turned(q, k, v, call, scene, extras, plan(call))


def turned(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras, ring: Ring
) -> jax.Array:
    """Attention on a given ring. A few queries stay whole, are shown to the keys of every device,
    and the parts are joined.
    """
    T, cut = q.shape[1], None if ring.few else ring.axis
    padded = ring.queries.local * (ring.size if cut else 1), ring.keys.local * ring.size
    q, k, v, scene, extras = filled(q, k, v, scene, extras, *padded)
    layout = None
    if call.placement is not None and call.settings.sharded:
        rows, _, heads, _ = (_without(entry, ring.axis) for entry in query_spec(call, q.shape))
        layout = P(rows, cut, heads)
    here: Any = functools.partial(_here, ring)
    return per_shard(here, q, k, v, call, scene, extras, layout=layout, keys=ring.axis)[:, :T]


def _here(
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    call: Call,
    scene: Scene,
    extras: Extras,
    /,
) -> jax.Array:
    """On one device, under `shard_map`."""
    tiles = ring.keys.tiles
    number = jnp.arange(tiles) + (jax.lax.axis_index(ring.axis) * tiles if ring.axis else 0)
    last = lambda x: x if x is None else exchanged(x, x.ndim - 1, ring)
    scene = dataclasses.replace(
        scene,
        q_slots=last(scene.q_slots),
        k_slots=last(scene.k_slots),
        keep=last(scene.keep),
        q_segments=last(scene.q_segments),
        k_segments=last(scene.k_segments),
    )
    extras = dataclasses.replace(extras, bias=exchanged(extras.bias, 2, ring), dropout_key=None)
    q, k, v = (exchanged(x, 1, ring) for x in (q, k, v))
    out = around(call, ring, q, k, v, last(number), scene, extras)
    return exchanged(out, 1, ring, back=True)


def _without(entry: Any, axis: str | None) -> Any:
    """One dimension of a PartitionSpec that leaves a mesh axis to the ring."""
    kept = tuple(a for a in mesh_axes(entry) if a != axis)
    return kept if len(kept) > 1 else kept[0] if kept else None


def refuse(call: Call) -> str | None:
    return "it has no dropout" if call.dropout else None


def prefer(call: Call) -> int:
    """Above all others where the mesh cuts the sequence, or the cache's keys, along the ring's
    axis.
    """
    if ring_size(call) == 1 or call.placement is None:
        return 0
    specs, rules = call.settings.specs, dict(call.placement.plan.activations)
    given, axis = (specs.query, "seq") if call.aligned else (specs.key, "keys")
    cut = rules.get(axis) if given is None else (*given, None, None)[1]
    return 100 if call.settings.axis in mesh_axes(cut) else 0


register(Mechanism("ring", attend, refuse, prefer))

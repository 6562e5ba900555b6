"""Running a mechanism on each device's own rows and heads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxen.attention.call import NOTHING, Call, Extras, Scene
from flaxen.attention.choose import Attend
from flaxen.shard.specs import mesh_axes, ways


def per_shard(
    attend: Attend,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    call: Call,
    scene: Scene,
    extras: Extras = NOTHING,
    *,
    layout: P | None = None,
    keys: str | None = None,
) -> jax.Array:
    """`attend` under `shard_map`: rows and heads, and the queries of a sequence that is cut, stay
    where they are; every device has all keys. Without a placement, `attend` itself.

    Where key heads cannot be cut as query heads are, each device takes those of its own queries.
    layout: of the queries, unless it is that of `query_spec`. keys: a mesh axis that keys are cut
    along, though not the columns of a bias.
    """
    if call.placement is None or not call.settings.sharded:
        return attend(q, k, v, dataclasses.replace(call, placement=None), scene, extras)
    mesh, specs = call.placement.mesh, call.settings.specs
    bias_spec = specs.generation_bias if call.queries == 1 else specs.bias
    out_spec = specs.generation_attention if call.queries == 1 else specs.attention
    k, v = laid_out(k, mesh, specs.key), laid_out(v, mesh, specs.value)
    if extras.bias is not None:
        extras = dataclasses.replace(extras, bias=laid_out(extras.bias, mesh, bias_spec))
    rows, seq, heads, *_ = layout or query_spec(call, q.shape)
    kv_heads = heads if k.shape[2] % ways(mesh, heads) == 0 else None
    n = q.shape[2] // ways(mesh, heads)

    def here(q: Any, k: Any, v: Any, scene: Scene, extras: Extras) -> jax.Array:
        if heads is not None and kv_heads is None:
            k, v = (own_heads(x, jax.lax.axis_index(heads) * n, n, call.group) for x in (k, v))
        local = dataclasses.replace(
            call,
            queries=q.shape[1],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            aligned=call.aligned and seq is None,
            placement=None,
        )
        if extras.dropout_key is not None:
            used = [a for entry in (rows, seq, heads) for a in mesh_axes(entry)]
            place = jax.lax.axis_index(tuple(used)) if used else 0
            key = jax.random.fold_in(extras.dropout_key, place)
            extras = dataclasses.replace(extras, dropout_key=key)
        return attend(q, k, v, local, dataclasses.replace(scene, aligned=local.aligned), extras)

    out = jax.shard_map(
        here,
        mesh=mesh,
        in_specs=(
            P(rows, seq, heads),
            P(rows, keys, kv_heads),
            P(rows, keys, kv_heads),
            scene_specs(scene, rows, seq, keys),
            extras_specs(extras, rows, heads, seq, None),
        ),
        out_specs=P(rows, seq, heads),
        check_vma=False,
    )(q, k, v, scene, extras)
    return laid_out(out, mesh, out_spec)


def query_spec(call: Call, shape: tuple[int, ...]) -> P:
    """How queries (batch, seq, heads, head_dim) lie on the mesh: as the settings say, or else the
    plan; what does not divide stays whole.
    """
    assert call.placement is not None
    specs, mesh = call.settings.specs, call.placement.mesh
    given = specs.generation_query if call.queries == 1 else specs.query
    if given is None:
        return call.placement.activation_spec(shape, ("batch", "seq", "heads", "head_dim"))
    return fitting(given, mesh, shape)


def laid_out(x: jax.Array, mesh: jax.sharding.Mesh, spec: P | None) -> jax.Array:
    """As a given layout says; without one, as it is."""
    if spec is None:
        return x
    there = NamedSharding(mesh, fitting(spec, mesh, x.shape))
    return jax.lax.with_sharding_constraint(x, there)


def fitting(spec: P, mesh: jax.sharding.Mesh, shape: tuple[int, ...]) -> P:
    """A layout without the axes that the mesh lacks or that do not divide."""
    entries = (*spec, *[None] * len(shape))[: len(shape)]
    found: list[Any] = []
    for entry, size in zip(entries, shape, strict=True):
        axes = tuple(axis for axis in mesh_axes(entry) if axis in mesh.shape)
        fits = len(axes) > 0 and size % ways(mesh, axes) == 0
        found.append(entry_of(axes) if fits else None)
    return P(*found)


def entry_of(axes: tuple[str, ...]) -> Any:
    """Mesh axes as one dimension of a PartitionSpec."""
    one, *more = axes
    return axes if more else one


def own_heads(x: jax.Array, first: Any, count: int, group: int) -> jax.Array:
    """The key heads of `count` query heads from `first` on. x: (B, S, K, H)."""
    if group % count == 0:
        return jax.lax.dynamic_slice_in_dim(x, first // group, 1, axis=2)
    if count % group == 0:
        return jax.lax.dynamic_slice_in_dim(x, first // group, count // group, axis=2)
    return jnp.take(x, (first + jnp.arange(count)) // group, axis=2)


def scene_specs(scene: Scene, rows: Any, seq: Any, keys: Any) -> Scene:
    """The layout of each array of a scene, in a scene."""
    slots = lambda x, cut: P(rows, cut) if x.ndim == 2 else P(cut)
    maybe = lambda x, spec: None if x is None else spec
    return dataclasses.replace(
        scene,
        q_slots=slots(scene.q_slots, seq),
        k_slots=slots(scene.k_slots, keys),
        keep=maybe(scene.keep, P(rows, keys)),
        q_segments=maybe(scene.q_segments, P(rows, seq)),
        k_segments=maybe(scene.k_segments, P(rows, keys)),
        prefix=maybe(scene.prefix, P(rows)),
    )


def extras_specs(extras: Extras, rows: Any, heads: Any, seq: Any, keys: Any) -> Extras:
    """The layout of each array of the extras, in extras."""
    bias = extras.bias
    cut = lambda axis, entry: entry if bias is not None and bias.shape[axis] > 1 else None
    found: dict[str, Any] = {
        "bias": bias is not None and P(cut(0, rows), cut(1, heads), cut(2, seq), cut(3, keys)),
        "slopes": P(heads),
        "sinks": P(heads),
        "dropout_key": P(),
    }
    return Extras(**{k: spec for k, spec in found.items() if getattr(extras, k) is not None})

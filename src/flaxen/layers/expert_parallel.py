"""Experts on a mesh: computed where they live, on tokens that travel there and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from flaxen.core.errors import ConfigError
from flaxen.layers.exchange import exchanged
from flaxen.layers.runtime import Runtime
from flaxen.shard import Placement
from flaxen.shard.specs import mesh_axes, ways


def where_experts_live(
    experts: Any, runtime: Runtime, x: jax.Array, weights: jax.Array, chosen: jax.Array
) -> jax.Array:
    """What `experts` make of x (B, T, D) on a mesh; weights and chosen (B, T, k) -> (B, T, D).

    Where the batch or the sequence divides by the devices that share the experts, each takes its
    own part of the tokens and sends them to those that hold their experts (`exchanged`), unless
    `runtime.mlp.exchange` is False. Tokens that cannot be cut so, as a single one that is decoded,
    go through the experts of every device, and the results are summed over them.
    """
    placement: Placement = runtime.placement  # type: ignore[assignment]
    mesh, (count, width, _) = placement.mesh, experts.gate_proj.weight.shape
    cut = placement.weight_spec({"experts": count, "mlp": width})
    e, f = (mesh_axes(entry) for entry in cut)
    rows = [
        tuple(a for a in mesh_axes(entry) if a not in f)
        for entry in placement.activation_spec(x.shape, ("batch", "seq", "embed"))[:2]
    ]
    apart = _cut_too(rows, e, x.shape, placement) if runtime.mlp.exchange else None
    whole = [tuple(a for a in axes if a not in e) for axes in rows]
    tokens = P(*(axes or None for axes in (apart or whole)))
    inner, outer = P(*cut, None), P(cut[0], None, cut[1])
    where = dataclasses.replace(
        experts,
        gate_proj=_specs(experts.gate_proj, inner, placement),
        up_proj=_specs(experts.up_proj, inner, placement),
        down_proj=_specs(experts.down_proj, outer, placement),
    )

    def here(experts: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        held, over = _biased_once(experts, f), f if apart else e + f
        if apart:
            y = exchanged(held.mix, e, count // ways(mesh, e), x, weights, chosen)
        else:
            first = jax.lax.axis_index(e) * (count // ways(mesh, e)) if e else 0
            y = held.mix(x, weights, chosen - first)
        return (jax.lax.psum(y, over) if over else y).astype(x.dtype)

    run = jax.shard_map(
        here, mesh=mesh, in_specs=(where, tokens, tokens, tokens), out_specs=tokens, check_vma=False
    )
    return run(experts, x, weights, chosen)


def _cut_too(
    rows: list[tuple[str, ...]], axes: tuple[str, ...], shape: tuple[int, ...], placement: Placement
) -> list[tuple[str, ...]] | None:
    """How the batch and the sequence are cut, along all of `axes` as well; None if that cannot be,
    or there are none.
    """
    more = tuple(a for a in axes if a not in rows[0] + rows[1])
    for i in range(2):
        wanted = [(*r, *more) if j == i else r for j, r in enumerate(rows)]
        if axes and shape[i] % ways(placement.mesh, wanted[i]) == 0:
            return wanted
    return None


def _specs(projections: Any, spec: P, placement: Placement) -> Any:
    """How the weight is cut; of a leaf, how its parts are, which have its axes: those of size 1 are
    whole.

    Raises:
        ConfigError: parts that are not cut as the weight is, as inputs that share a scale would lie
            on two devices.
    """

    def part(x: Any) -> P:
        for n, cut in zip(x.shape, spec, strict=True):
            axes = mesh_axes(cut)
            if n > 1 and n % ways(placement.mesh, axes):
                raise ConfigError(
                    f"The weights of these experts are stored in parts of shape {x.shape}, and {n} "
                    f"does not divide by {'*'.join(axes)}={ways(placement.mesh, axes)}. Round them "
                    "with a smaller group, or 8 bits, or not at all; or cut them otherwise."
                )
        return P(*(cut if n > 1 else None for n, cut in zip(x.shape, spec, strict=True)))

    return dataclasses.replace(
        projections,
        weight=jax.tree.map(part, projections.weight),
        bias=None if projections.bias is None else P(*spec[:2]),
    )


def _biased_once(experts: Any, axes: tuple[str, ...]) -> Any:
    """Each part of the inner width gives a part of the result, and one of them adds the bias."""
    down = experts.down_proj
    if down.bias is None or not axes:
        return experts
    bias = jnp.where(jax.lax.axis_index(axes) == 0, down.bias, 0)
    return dataclasses.replace(experts, down_proj=dataclasses.replace(down, bias=bias))

"""Mixtures of experts: each token goes through a few of many feed-forward networks.

Letters: N tokens, k experts of a token, D embed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from flaxen.core.dot import dot
from flaxen.core.errors import ConfigError
from flaxen.core.tree import module, param, static
from flaxen.layers.context import Context
from flaxen.layers.grouped import grouped_dot
from flaxen.layers.linear import Linear
from flaxen.layers.mlp import ACTIVATIONS
from flaxen.layers.runtime import Runtime
from flaxen.shard import Placement
from flaxen.shard.specs import mesh_axes, ways


@module
class Router:
    """Softmax over all experts in float32; the `k` largest are a token's weights."""

    weight: Any
    k: static[int]

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x (B, T, D) -> weights (B, T, k) float32 and which experts, (B, T, k)."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return jax.lax.top_k(jax.nn.softmax(dot(wide, self.weight)), self.k)


@module
class NormalisedRouter(Router):
    """The same; a token's weights are scaled to sum to one."""

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights, chosen = Router.__call__(self, x)
        return weights / weights.sum(-1, keepdims=True), chosen


@module
class Projections:
    """One projection for each expert: weight (experts, out, in)."""

    weight: Any

    def __call__(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """x (rows, in), expert by expert, `sizes` rows of each -> (rows, out)."""
        return grouped_dot(x, self.weight, sizes).astype(x.dtype)


@module
class Experts:
    """down(act(gate(x)) * up(x)) for each expert.

    On a mesh, experts are computed where they live: each device sends its tokens through the
    experts (and the part of `mlp`) that it holds, and the results are summed.
    """

    gate_proj: Projections
    up_proj: Projections
    down_proj: Projections
    act: static[str]

    def __call__(
        self, x: jax.Array, weights: jax.Array, chosen: jax.Array, runtime: Runtime
    ) -> jax.Array:
        """x (B, T, D), weights and chosen (B, T, k) -> (B, T, D)."""
        if runtime.placement is None:
            return self._mix(x, weights, chosen).astype(x.dtype)
        return _where_experts_live(self, runtime.placement, x, weights, chosen)

    def _mix(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """The weighted sum over a token's experts; numbers that are none of ours are left out."""
        k, count = chosen.shape[-1], self.gate_proj.weight.shape[0]
        where = jnp.where((chosen >= 0) & (chosen < count), chosen, count).reshape(-1)
        order = jnp.argsort(where)
        sizes = jnp.bincount(where, length=count + 1)[:count]
        y = self._each(x.reshape(-1, x.shape[-1])[order // k], sizes)
        y = y[jnp.argsort(order)].reshape(-1, k, x.shape[-1])
        ours = (where < count).reshape(-1, k, 1)
        y = jnp.where(ours, y, 0) * weights.reshape(-1, k, 1)
        return y.sum(1).reshape(x.shape)

    def _each(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        inner = ACTIVATIONS[self.act](self.gate_proj(x, sizes)) * self.up_proj(x, sizes)
        return self.down_proj(inner, sizes)


def _where_experts_live(
    experts: Experts, placement: Placement, x: jax.Array, weights: jax.Array, chosen: jax.Array
) -> jax.Array:
    count, width, _ = experts.gate_proj.weight.shape
    cut = placement.weight_spec({"experts": count, "mlp": width})
    e, f = (mesh_axes(entry) for entry in cut)
    rows = placement.activation_spec(x.shape, ("batch", "seq", "embed"))[:2]
    tokens = P(*(tuple(a for a in mesh_axes(r) if a not in e + f) or None for r in rows))
    inner, outer = P(*cut, None), P(cut[0], None, cut[1])
    where = Experts(
        gate_proj=_specs(experts.gate_proj, inner, placement),
        up_proj=_specs(experts.up_proj, inner, placement),
        down_proj=_specs(experts.down_proj, outer, placement),
        act=experts.act,
    )

    def here(experts: Experts, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        first = jax.lax.axis_index(e) * (count // ways(placement.mesh, e)) if e else 0
        y = experts._mix(x, weights, chosen - first)
        return (jax.lax.psum(y, e + f) if e + f else y).astype(x.dtype)

    run = jax.shard_map(
        here,
        mesh=placement.mesh,
        in_specs=(where, tokens, tokens, tokens),
        out_specs=tokens,
        check_vma=False,
    )
    return run(experts, x, weights, chosen)


def _specs(projections: Projections, spec: P, placement: Placement) -> Projections:
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

    return Projections(weight=jax.tree.map(part, projections.weight))


@module
class SharedExpert:
    """An expert for every token, weighed by the sigmoid of a score of its own."""

    expert: Any
    gate: Linear

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        return jax.nn.sigmoid(self.gate(x))[..., None] * self.expert(x, ctx)


def shared_expert(expert: Any, embed: int) -> SharedExpert:
    """The file's scores have an output axis of one; ours have none."""
    return SharedExpert(expert=expert, gate=Linear(weight=param("1 embed", embed=embed)))


@module
class MoE:
    """The experts that `gate` chooses, plus what is `shared` by all tokens."""

    gate: Any
    experts: Experts
    shared: Any = None

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        weights, chosen = self.gate(x)
        y = self.experts(x, weights, chosen, ctx.runtime)
        return y if self.shared is None else y + self.shared(x, ctx)


def router(embed: int, experts: int, k: int, *, normalised: bool) -> Router:
    """Which of the two routers, by size."""
    kind = NormalisedRouter if normalised else Router
    return kind(weight=param(experts=experts, embed=embed), k=k)


def moe(gate: Router, mlp: int, act: str, shared: Any = None) -> MoE:
    """A mixture behind a router, with `mlp` inner channels in each expert.

    The file has one tensor for each expert: `experts` stands in its name, not in its shape.
    """
    ACTIVATIONS[act]
    E, D, F = gate.weight.axes["experts"], gate.weight.axes["embed"], mlp
    inner = partial(param, "mlp embed", experts=E, mlp=F, embed=D)
    return MoE(
        gate=gate,
        experts=Experts(
            gate_proj=Projections(weight=inner()),
            up_proj=Projections(weight=inner()),
            down_proj=Projections(weight=param("embed mlp", experts=E, embed=D, mlp=F)),
            act=act,
        ),
        shared=shared,
    )

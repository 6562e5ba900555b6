"""Mixtures of experts: each token goes through a few of many feed-forward networks.

Letters: N tokens, k experts of a token, D embed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.dot import product
from flaxen.core.platform import platform
from flaxen.core.tree import module, param, static, zeros_param
from flaxen.layers.context import Context
from flaxen.layers.expert_blocks import sum_of_experts
from flaxen.layers.expert_parallel import where_experts_live
from flaxen.layers.grouped import grouped_dot
from flaxen.layers.linear import Linear
from flaxen.layers.mlp import ACTIVATIONS
from flaxen.layers.runtime import Runtime


@module
class Projections:
    """One projection for each expert: weight (experts, out, in), bias (experts, out) or None."""

    weight: Any
    bias: Any = None

    def __call__(self, x: jax.Array, sizes: jax.Array) -> jax.Array:
        """x (rows, in), expert by expert, `sizes` rows of each -> (rows, out)."""
        y = grouped_dot(x, self.weight, sizes)
        if self.bias is not None:
            y = y + jnp.repeat(self.bias, sizes, axis=0, total_repeat_length=len(x))
        return y.astype(x.dtype)

    def alone(self, x: jax.Array) -> jax.Array:
        """The same of a projection without its first axis."""
        y = product(x, self.weight, (((1,), (1,)), ((), ())))
        return (y if self.bias is None else y + self.bias).astype(x.dtype)


@module
class Experts:
    """down(act(gate(x)) * up(x)) for each expert; a token's results are weighed and summed.

    On a mesh, experts are computed where they live: see `expert_parallel`.
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
            return self.mix(x, weights, chosen).astype(x.dtype)
        return where_experts_live(self, runtime, x, weights, chosen)

    def mix(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """The weighted sum over a token's experts; numbers that are none of ours are left out."""
        k, count = chosen.shape[-1], self.gate_proj.weight.shape[0]
        where = jnp.where((chosen >= 0) & (chosen < count), chosen, count).reshape(-1)
        order = jnp.argsort(where)
        sizes = jnp.bincount(where, length=count + 1)[:count]
        tokens, shares, flat = order // k, weights.reshape(-1)[order], x.reshape(-1, x.shape[-1])
        if platform() == "cpu":
            y: Any = sum_of_experts(type(self).alone, self, flat, shares, tokens, sizes)
            return y.reshape(x.shape)
        y = self.through(lambda p, rows: p(rows, sizes), flat[tokens], shares[:, None])
        ours = (where < count)[:, None]
        y = jnp.where(ours, y[jnp.argsort(order)], 0)
        return y.reshape(-1, k, x.shape[-1]).sum(1).reshape(x.shape)

    def alone(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """One expert's weighed results, of experts without their first axis; x (rows, D)."""
        return self.through(Projections.alone, x, weights)

    def through(
        self, project: Callable[[Any, jax.Array], jax.Array], x: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """The weighed results of rows (rows, D), weights (rows, 1); `project` is how a projection
        is applied.
        """
        rows = self.entering(x, weights)
        inner = self.inner(project(self.gate_proj, rows), project(self.up_proj, rows))
        return self.leaving(project(self.down_proj, inner), weights)

    def inner(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """What the last projection is given, (rows, F)."""
        return ACTIVATIONS[self.act](gate) * up

    def entering(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        """What experts are given of tokens (rows, D) with these weights (rows, 1)."""
        return x

    def leaving(self, y: jax.Array, weights: jax.Array) -> jax.Array:
        """What is summed of the experts' results (rows, D)."""
        return y * weights


@module
class ClippedExperts(Experts):
    """down(gate * sigmoid(alpha * gate) * (up + 1)), gate and up clipped at `limit` (GPT-OSS)."""

    alpha: static[float]
    limit: static[float]

    def inner(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = jnp.minimum(gate, self.limit)
        return (
            gate * jax.nn.sigmoid(self.alpha * gate) * (jnp.clip(up, -self.limit, self.limit) + 1)
        )


@module
class WeighedInputExperts(Experts):
    """A token's weight is put on what its experts are given, not on their results (Llama 4)."""

    def entering(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        return x * weights.astype(x.dtype)

    def leaving(self, y: jax.Array, weights: jax.Array) -> jax.Array:
        return y


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


def moe(
    gate: Any,
    mlp: int,
    act: str,
    shared: Any = None,
    *,
    bias: bool = False,
    kind: type[Experts] = Experts,
    **slots: Any,
) -> MoE:
    """A mixture behind a router, with `mlp` inner channels in each expert.

    The file has one tensor for each expert: `experts` stands in its name, not in its shape. `slots`
    are the other fields of the `kind` of experts.

    Raises:
        ConfigError: a router that would choose more experts than there are, or among groups that
        there cannot be.
    """
    ACTIVATIONS[act]
    gate.check()
    E, D = {"experts": gate.weight.axes["experts"]}, {"embed": gate.weight.axes["embed"]}
    F = {"mlp": mlp}

    def each(src: dict[str, int], dst: dict[str, int]) -> Projections:
        layout = " ".join([*dst, *src])
        return Projections(
            weight=param(layout, **E, **dst, **src),
            bias=zeros_param(*dst, **E, **dst) if bias else None,
        )

    experts = kind(gate_proj=each(D, F), up_proj=each(D, F), down_proj=each(F, D), act=act, **slots)
    return MoE(gate=gate, experts=experts, shared=shared)

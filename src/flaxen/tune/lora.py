"""Low-rank adapters: a leaf that stands where a weight stands and adds `scale * b @ a` to it.

Source: LoRA, https://arxiv.org/abs/2106.09685; rank-stabilised scale,
https://arxiv.org/abs/2312.03732.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxen.core.dot import dot, is_leaf_type, rows
from flaxen.core.errors import ConfigError, did_you_mean
from flaxen.core.tree import module, name_of, paths, static
from flaxen.layers.linear import Linear
from flaxen.models.fold import in_body
from flaxen.quantize import QuantizedWeight

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@module
class LowRank:
    """A weight (out..., in...) and its adapter: a (rank, in...), b (out..., rank).

    In a folded model all three have a `layers` axis in front.
    """

    weight: Any
    a: Any
    b: Any
    scale: static[float]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def ndim(self) -> int:
        return len(self.weight.shape)

    @property
    def dtype(self) -> Any:
        return self.weight.dtype

    @property
    def stacked(self) -> int:
        """1 if there is a `layers` axis, else 0."""
        return self.a.ndim + self.b.ndim - 2 - self.ndim

    @property
    def rank(self) -> int:
        return self.a.shape[self.stacked]

    def dot(self, x: jax.Array, contract: int) -> jax.Array:
        """As `core.dot.dot`, for the sum of the weight and its adapter."""
        low = dot(dot(x, self.a, contract), self.b)
        return dot(x, self.weight, contract) + jnp.asarray(self.scale, low.dtype) * low

    def rows(self, ids: jax.Array) -> jax.Array:
        """As `core.dot.rows`, for the sum of the weight and its adapter."""
        low = rows(self.b, ids) @ self.a
        return rows(self.weight, ids) + (self.scale * low).astype(self.dtype)

    def shardings(self, where: Any) -> LowRank:
        """The leaf with the place of each array, for a weight that lies at `where`."""
        weight = self.weight.shardings(where) if is_leaf_type(self.weight) else where
        a = b = where
        if isinstance(where, NamedSharding):
            spec = (*where.spec, *[None] * self.ndim)[: self.ndim]
            split = self.b.ndim - 1
            a = NamedSharding(where.mesh, P(*spec[: self.stacked], None, *spec[split:]))
            b = NamedSharding(where.mesh, P(*spec[:split], None))
        return dataclasses.replace(self, weight=weight, a=a, b=b)


def is_low_rank(x: Any) -> bool:
    return isinstance(x, LowRank)


def adapters(tree: Any) -> dict[str, LowRank]:
    """Every low-rank leaf of a model by path."""
    found = paths(tree, is_leaf=is_low_rank)
    return {path: leaf for path, leaf in found.items() if isinstance(leaf, LowRank)}


def scale_of(rank: int, alpha: float, rank_stabilised: bool = False) -> float:
    """alpha / rank, or alpha / sqrt(rank)."""
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)


def add_lora(
    tree: Any,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: str | Sequence[str] | None = None,
    rank_stabilised: bool = False,
    seed: int = 0,
) -> Any:
    """The model with an adapter on each target; it computes the same until an adapter is trained.

    `targets` are names of projections, or a regular expression for the whole path of one
    (`.*self_attn.q_proj`); by default all of `PROJECTIONS` that the model has. Experts of a mixture
    are no targets.
    `a` is normal with variance 1 / inputs, `b` is zero; both are float32. The weights are shared
    with the given model.

    Raises:
        ConfigError: a rank below 1, a target that matches nothing, or a model that has adapters
            already.
    """
    if rank < 1:
        raise ConfigError(f"rank is {rank}; expected 1 or more.")
    if adapters(tree):
        raise ConfigError("This model has adapters already; merge them before adding others.")
    chosen, folded = matching(tree, targets), in_body(tree)
    scale = scale_of(rank, alpha, rank_stabilised)

    def adapt(path: str, layer: Linear) -> Linear:
        if path not in chosen:
            return layer
        a, b = adapter_shapes(layer, rank, folded(path))
        # Drawn by NumPy: small, and nothing to compile for each shape.
        draw = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(path.encode())]))
        std = math.prod(layer.weight.shape[-layer.contract :]) ** -0.5
        start = draw.standard_normal(a, np.float32) * np.float32(std)
        return with_adapter(layer, start, np.zeros(b, np.float32), scale)

    return map_linears(adapt, tree)


def merge(tree: Any) -> Any:
    """The model with plain weights: W + scale * b @ a in float32, cast once to the weight's dtype;
    a packed W becomes a plain weight too.

    Raises:
        ConfigError: when there is no adapter, so that nothing is merged twice unnoticed.
    """
    if not adapters(tree):
        raise ConfigError("This model has no adapters to merge; were they merged already?")
    return jax.tree.map(lambda x: _merged(x) if is_low_rank(x) else x, tree, is_leaf=is_low_rank)


def without_adapters(tree: Any) -> Any:
    """The model as it was before it got adapters: its own weights, the very same arrays."""
    return jax.tree.map(lambda x: x.weight if is_low_rank(x) else x, tree, is_leaf=is_low_rank)


@jax.jit
def _merged(leaf: LowRank) -> jax.Array:
    batch = tuple(range(leaf.stacked))
    over = (((leaf.b.ndim - 1,), (leaf.stacked,)), (batch, batch))
    change = jax.lax.dot_general(leaf.b, leaf.a, over, precision="highest")
    weight = leaf.weight
    if isinstance(weight, QuantizedWeight):
        weight = (jax.vmap(QuantizedWeight.values) if leaf.stacked else QuantizedWeight.values)(
            weight
        )
    return (weight.astype(jnp.float32) + leaf.scale * change).astype(leaf.dtype)


def map_linears(change: Callable[[str, Linear], Linear], tree: Any) -> Any:
    """`tree` with `change(path, projection)` in place of every projection."""
    return jax.tree.map_with_path(
        lambda path, x: change(name_of(path), x) if _is_linear(x) else x, tree, is_leaf=_is_linear
    )


def adapter_shapes(layer: Linear, rank: int, folded: bool) -> tuple[tuple[int, ...], ...]:
    """Shapes of `a` and `b` for a projection."""
    shape, split = layer.weight.shape, len(layer.weight.shape) - layer.contract
    stack = shape[: int(folded)]
    return (*stack, rank, *shape[split:]), (*shape[:split], rank)


def with_adapter(layer: Linear, a: np.ndarray, b: np.ndarray, scale: float) -> Linear:
    """The projection with this adapter, which is cut along the same mesh axes as the weight."""
    leaf = LowRank(weight=layer.weight, a=jnp.asarray(a), b=jnp.asarray(b), scale=scale)
    sharding = getattr(layer.weight, "sharding", None)
    if isinstance(sharding, NamedSharding):
        places = leaf.shardings(sharding)
        leaf = dataclasses.replace(
            leaf, a=jax.device_put(a, places.a), b=jax.device_put(b, places.b)
        )
    return dataclasses.replace(layer, weight=leaf)


def _is_linear(x: Any) -> bool:
    return isinstance(x, Linear)


def matching(tree: Any, targets: str | Sequence[str] | None) -> set[str]:
    """Paths of the projections that the targets mean."""
    every = [path for path, x in paths(tree, is_leaf=_is_linear).items() if _is_linear(x)]
    kinds = {path.rpartition(".")[2] for path in every}
    if targets is None:
        targets = [name for name in PROJECTIONS if name in kinds]
    if isinstance(targets, str):
        return _matching_pattern(every, targets)
    wrong = [target for target in targets if target not in kinds]
    if wrong:
        words = " ".join(f"{t!r} matches no projection.{did_you_mean(t, kinds)}" for t in wrong)
        raise ConfigError(f"Cannot add adapters: {words}")
    return {path for path in every if path.rpartition(".")[2] in targets}


def _matching_pattern(every: list[str], pattern: str) -> set[str]:
    try:
        found = {path for path in every if re.fullmatch(pattern, path)}
    except re.error as error:
        raise ConfigError(f"targets {pattern!r} is no regular expression: {error}.") from error
    if not found:
        raise ConfigError(
            f"The expression {pattern!r} matches the whole path of no projection."
            f"{did_you_mean(pattern, every)}"
        )
    return found

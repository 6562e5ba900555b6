"""Where an optimiser's state lies: each moment with its weight, whatever else everywhere."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from flaxen.core.tree import paths


def opt_state(optimizer: Any, masters: Any) -> Any:
    """The optimiser's first state, each moment where its weight is."""
    shapes = opt_shapes(optimizer, masters)
    if any(map(is_shape, jax.tree.leaves(masters))):
        return shapes
    where = jax.tree.map(lambda x: x.sharding, shapes)
    return jax.jit(optimizer.init, out_shardings=where)(masters)


def opt_shapes(optimizer: Any, masters: Any) -> Any:
    """The shapes and shardings of that state, for weights or their shapes and shardings."""
    shapes, weights = jax.eval_shape(optimizer.init, masters), paths(masters)

    def described(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        weight = _of_path(jax.tree_util.keystr(path, simple=True, separator="."), weights)
        # What is less than a weight, as Adafactor's rows and columns, is small.
        where = everywhere(masters)
        if weight is not None and weight.shape == x.shape:
            where = weight.sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map_with_path(described, shapes)


def _of_path(path: str, weights: dict[str, Any]) -> Any:
    """The weight whose own path ends the path of a moment; None of counters and the like."""
    while path not in weights and path:
        path = path.partition(".")[2]
    return weights.get(path)


def is_shape(x: Any) -> bool:
    """Whether it only describes an array."""
    return isinstance(x, jax.ShapeDtypeStruct)


def everywhere(masters: Any) -> Sharding:
    """Whole on every device that the weights are on."""
    sharding = jax.tree.leaves(masters)[0].sharding
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding

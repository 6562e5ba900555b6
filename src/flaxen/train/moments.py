"""Where an optimiser's state lies: each moment with its weight, whatever else everywhere."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def opt_state(optimizer: Any, masters: Any) -> Any:
    """The optimiser's first state, each moment where its weight is."""
    where = jax.tree.map(lambda x: x.sharding, opt_shapes(optimizer, masters))
    return jax.jit(optimizer.init, out_shardings=where)(masters)


def opt_shapes(optimizer: Any, masters: Any) -> Any:
    """The shapes and shardings of that state, for weights or their shapes and shardings."""
    import optax

    shapes = jax.eval_shape(optimizer.init, masters)
    where = optax.tree_utils.tree_map_params(
        optimizer,
        # What is less than a weight, as Adafactor's rows and columns, is small.
        lambda x, weight: weight.sharding if x.shape == weight.shape else everywhere(masters),
        shapes,
        masters,
        transform_non_params=lambda _: everywhere(masters),
    )
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        where,
    )


def everywhere(masters: Any) -> Sharding:
    """Whole on every device that the weights are on."""
    sharding = jax.tree.leaves(masters)[0].sharding
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding

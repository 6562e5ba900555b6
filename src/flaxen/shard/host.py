"""Between a host's memory and arrays that several processes share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.shard.place import Placement


def on_host(tree: Any) -> Any:
    """NumPy arrays of everything in a tree; all processes that share it must ask together."""
    return jax.tree.map(_whole, tree)


def _whole(x: Any) -> np.ndarray:
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def from_first(number: float) -> float:
    """The number that the first of all processes has; all must ask together."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    # Its bits: with 32 bit floats alone, a float64 would come back rounded.
    bits = multihost_utils.broadcast_one_to_all(np.array([number], np.float64).view(np.uint32))
    return float(np.asarray(bits, np.uint32).view(np.float64)[0])


def everywhere(tree: Any, placement: Placement | None) -> Any:
    """Host values and random keys, whole on every device of a placement, or on the default one."""
    if placement is None or jax.process_count() == 1:
        return jax.device_put(tree, placement and placement.replicated())
    where = placement.replicated()

    def put(x: Any) -> jax.Array:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                put(jax.random.key_data(x)), impl=jax.random.key_impl(x)
            )
        value = np.asarray(x)
        return jax.make_array_from_callback(value.shape, where, value.__getitem__)

    return jax.tree.map(put, tree)

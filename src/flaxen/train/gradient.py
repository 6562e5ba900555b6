"""The gradient of a whole batch, micro-batch by micro-batch, as one mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from flaxen.train.objectives import Batch, Metrics

Loss = Callable[[Any, Any, Batch], tuple[jax.Array, Metrics]]
"""(weights, what stays, one micro-batch) -> the sum of its losses, sums of what else is told."""

Gradient = Callable[[Any, Any, Batch, jax.Array | float], tuple[jax.Array, Metrics, Any, jax.Array]]
"""(masters, what stays, batch, scale) -> mean loss over the weight of all micro-batches, means of
what else is told, float32 gradient, weight. The backward pass computes with `scale` times the loss.
"""


def gradient_of(
    loss: Loss, weight: Callable[[Batch], jax.Array], cast: Callable[[Any], Any], where: Any
) -> Gradient:
    """`cast` makes of masters what is computed with; the gradient lies at `where`, a tree of
    shardings.
    """

    def one(
        weights: Any, frozen: Any, micro: Batch, share: jax.Array, scale: jax.Array | float
    ) -> Any:
        def mean(weights: Any) -> tuple[jax.Array, Any]:
            total, told = loss(weights, frozen, micro)
            told = jax.tree.map(lambda x: x * share, told)
            return total * share * scale, (total * share, told)

        (_, (value, told)), grads = jax.value_and_grad(mean, has_aux=True)(weights)
        wide = lambda g, sharding: _laid_out(g.astype(jnp.float32) / scale, sharding)
        return value, told, jax.tree.map(wide, grads, where)

    def gradient(masters: Any, frozen: Any, batch: Batch, scale: jax.Array | float) -> Any:
        weights, total = cast(masters), weight(batch)
        share = 1 / jnp.maximum(total, 1).astype(jnp.float32)
        first = {key: rows[0] for key, rows in batch.items()}
        if batch["dropout_keys"].shape[0] == 1:
            return *one(weights, frozen, first, share, scale), total

        def add(sums: Any, micro: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, one(weights, frozen, micro, share, scale)), None

        told = jax.eval_shape(loss, weights, frozen, first)[1]
        zeros = jax.tree.map(lambda x, s: _laid_out(jnp.zeros_like(x), s), masters, where)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), told)
        sums, _ = jax.lax.scan(add, (jnp.zeros(()), nothing, zeros), batch)
        return *sums, total

    return gradient


def _laid_out(x: jax.Array, sharding: Sharding) -> jax.Array:
    return (
        jax.lax.with_sharding_constraint(x, sharding) if isinstance(sharding, NamedSharding) else x
    )

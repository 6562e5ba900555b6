"""From the states of all tokens to one vector for each row: x (B, T, D), keep (B, T) -> (B, D).

keep is False for padding, which counts for nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, static


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _sum(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(weights[..., None] > 0, _wide(x) * weights[..., None], 0), axis=1)


def _at(x: jax.Array, slots: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, slots[:, None, None], axis=1)[:, 0]


@module
class FirstSlot:
    """Whatever stands first, padding or not."""

    def __call__(self, x: jax.Array, keep: jax.Array) -> jax.Array:
        return x[:, 0]


@module
class FirstToken:
    """The first real token."""

    def __call__(self, x: jax.Array, keep: jax.Array) -> jax.Array:
        return _at(x, jnp.argmax(keep, axis=1))


@module
class LastToken:
    """The last real token."""

    def __call__(self, x: jax.Array, keep: jax.Array) -> jax.Array:
        return _at(x, keep.shape[1] - 1 - jnp.argmax(keep[:, ::-1], axis=1))


@module
class Mean:
    """The mean of the tokens; zeros where there are none."""

    def __call__(self, x: jax.Array, keep: jax.Array) -> jax.Array:
        weights = keep.astype(jnp.float32)
        total = jnp.maximum(weights.sum(1, keepdims=True), 1)
        return (_sum(x, weights) / total).astype(x.dtype)


@module
class MeanOverRoot:
    """The sum of the tokens, divided by the square root of their number."""

    def __call__(self, x: jax.Array, keep: jax.Array) -> jax.Array:
        weights = keep.astype(jnp.float32)
        total = jnp.maximum(weights.sum(1, keepdims=True), 1)
        return (_sum(x, weights) / jnp.sqrt(total)).astype(x.dtype)


@module
class WeightedMean:
    """The mean in which the n-th slot counts n times."""

    def __call__(self, x: jax.Array, keep: jax.Array) -> jax.Array:
        weights = keep * jnp.arange(1, keep.shape[1] + 1, dtype=jnp.float32)
        total = jnp.maximum(weights.sum(1, keepdims=True), 1)
        return (_sum(x, weights) / total).astype(x.dtype)


@module
class Max:
    """The largest number of each channel."""

    def __call__(self, x: jax.Array, keep: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(keep[..., None], x, jnp.asarray(-1e9, x.dtype)), axis=1)


@module
class FirstAndMean:
    """What stands first beside the mean of what follows after `leading` slots: (B, 2 * D)."""

    leading: static[int] = 1

    def __call__(self, x: jax.Array, keep: jax.Array) -> jax.Array:
        rest = Mean()(x[:, self.leading :], keep[:, self.leading :])
        return jnp.concatenate([x[:, 0], rest], -1)

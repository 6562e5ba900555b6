"""Losses of classifiers, as Transformers defines them; float32 at least."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flaxen.layers.cross_entropy import IGNORED


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def cross_entropy(logits: jax.Array, labels: jax.Array, ignored: int = IGNORED) -> jax.Array:
    """Mean of -log p over the labels that are not `ignored`, 0 if all are. logits (..., L), labels
    (...).
    """
    keep = labels != ignored
    logp = jax.nn.log_softmax(_wide(logits))
    picked = jnp.take_along_axis(logp, jnp.where(keep, labels, 0)[..., None], -1)[..., 0]
    return -jnp.where(keep, picked, 0).sum() / jnp.maximum(keep.sum(), 1)


def squared_error(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean square of the difference, of as many numbers each."""
    return jnp.mean((_wide(logits) - labels.reshape(logits.shape)) ** 2)


def binary_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Each label by itself: labels (B, L) between 0 and 1."""
    x = _wide(logits)
    return jnp.mean(jnp.maximum(x, 0) - x * labels + jnp.log1p(jnp.exp(-jnp.abs(x))))

"""The loss of a language model, without holding the scores of a whole batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.dot import dot

IGNORED = -100
"""The label of a slot that predicts nothing."""


def linear_cross_entropy(
    x: jax.Array, weight: Any, labels: jax.Array, *, softcap: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Sum of -log p(label) in float32 and the number of targets. x: (rows, embed), weight: (vocab,
    embed), labels: (rows,).
    """
    y = dot(x, weight).astype(jnp.float32)
    if softcap:
        y = softcap * jnp.tanh(y / softcap)
    keep = labels != IGNORED
    picked = jnp.take_along_axis(jax.nn.log_softmax(y), jnp.maximum(labels, 0)[:, None], -1)[:, 0]
    return -jnp.where(keep, picked, 0).sum(), keep.sum()

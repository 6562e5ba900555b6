"""What becomes of the states of tokens on the way to one vector: (B, T, D) -> (B, E)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.errors import ConfigError
from flaxen.core.tree import module, static
from flaxen.layers.linear import Linear
from flaxen.layers.mlp import ACTIVATIONS
from flaxen.layers.pooling import FirstToken, LastToken, Max, Mean, MeanOverRoot, WeightedMean

POOLINGS: dict[str, Any] = {
    "cls": FirstToken(),
    "max": Max(),
    "mean": Mean(),
    "mean_sqrt_len_tokens": MeanOverRoot(),
    "weightedmean": WeightedMean(),
    "lasttoken": LastToken(),
}
"""By sentence-transformers' names, in the order in which it joins several."""


@module
class Pool:
    """One or several ways of pooling, side by side."""

    ways: tuple[Any, ...]

    def __call__(self, x: jax.Array, keep: jax.Array) -> jax.Array:
        """x (B, T, D), keep (B, T) -> (B, ways * D)."""
        return jnp.concatenate([way(x, keep) for way in self.ways], axis=-1)


@module
class Dense:
    """act(linear(x)); no act is the identity."""

    linear: Linear
    act: static[str | None] = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, D) -> (B, E).

        Raises:
            ConfigError: vectors of another width than it takes.
        """
        width = self.linear.weight.shape[1]
        if x.shape[-1] != width:
            raise ConfigError(
                f"A Dense layer of modules.json takes vectors of {width} numbers; those before it "
                f"have {x.shape[-1]}."
            )
        y = self.linear(x)
        return y if self.act is None else ACTIVATIONS[self.act](y)


@module
class Normalize:
    """Every vector gets the length 1."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, D) -> (B, D)."""
        return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)

"""How encoders count positions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class CountSlots:
    """Positions from 0 on, padding too."""

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids (B, T) -> positions (B, T)."""
        return jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)

    def rows(self, length: int) -> int:
        """How many rows of a table so many tokens need."""
        return length

    def unlearned(self, positions: jax.Array) -> jax.Array | None:
        """Which positions learn nothing, if any."""
        return None


@dataclasses.dataclass(frozen=True)
class CountAfter:
    """RoBERTa's positions: tokens count from `pad` + 1 on, those that are `pad` stay at `pad`."""

    pad: int

    def __call__(self, ids: jax.Array) -> jax.Array:
        real = ids != self.pad
        return jnp.cumsum(real, axis=1, dtype=jnp.int32) * real + self.pad

    def rows(self, length: int) -> int:
        return length + self.pad + 1

    def unlearned(self, positions: jax.Array) -> jax.Array | None:
        return positions == self.pad

"""What a text's pictures are to the model that reads it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.tree import module


@module
class Sight:
    """features: (N, D), tokens of all pictures, perhaps with more behind them; which: (B, T), the
    one that stands in each slot, -1 for words.

    positions: (axes, B, T), counted from 0, where pictures count otherwise than words do; shift:
    (B,), how much further the next position is than the number of tokens.
    """

    features: jax.Array
    which: Any
    positions: Any = None
    shift: Any = None

    def embedding(self) -> jax.Array:
        """What stands in place of the words' embeddings, (B, T, D)."""
        return self.features[jnp.maximum(jnp.asarray(self.which), 0)]

    def laid(self, order: np.ndarray, slots: int) -> Sight:
        """With the slots (B, width) in this order, and empty ones up to `slots`."""
        after = [(0, 0), (0, slots - order.shape[1])]
        lay = lambda x: np.pad(np.take_along_axis(np.asarray(x), order, 1), after)
        positions = self.positions
        if positions is not None:
            positions = np.stack([lay(axis) for axis in np.asarray(positions)])
        return dataclasses.replace(self, which=lay(self.which), positions=positions)

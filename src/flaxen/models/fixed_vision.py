"""Pictures of one size, each of the same number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, static
from flaxen.layers.patches import grid_of
from flaxen.layers.runtime import Runtime
from flaxen.models.packed_vision import Pictures
from flaxen.models.vision import Tower


@module
class FixedTower:
    """projector: from states of patches (B, N, D) to tokens of the text model.

    states: which states these are, side by side: those after so many layers, negative ones counted
    from the last; none: what the tower gives in the end. skip: so many tokens before the patches
    are left out; tokens: what becomes of one picture.
    """

    tower: Tower
    projector: Any
    tokens: static[int]
    states: static[tuple[int, ...]] = ()
    skip: static[int] = 0

    inputs: ClassVar[tuple[str, ...]] = ("pixel_values",)

    def pictures(self, given: Mapping[str, Any]) -> Pictures:
        """
        Raises:
            InputError: pictures of another size.
        """
        pixels = self.tower.check(given["pixel_values"])
        return Pictures(pixels, (len(pixels) * self.tokens,))

    def features(self, pixels: jax.Array, runtime: Runtime) -> jax.Array:
        """(B, C, H, W) -> (B * tokens, D)."""
        x, states, _ = self.tower.hidden(pixels, runtime, collect=bool(self.states))
        with runtime.products():
            if self.states:
                x = jnp.concatenate([states[i] for i in self.states], -1)
            y = self.projector(x[:, self.skip :])
            return y.reshape(-1, y.shape[-1])


def patch_count(tower: Tower) -> int:
    """Patches of a picture, and what stands before them."""
    rows, columns = grid_of(tower.image, tower.patches.size)
    return rows * columns + tower.leading

"""What every layer may look at besides the residual stream."""

from __future__ import annotations

import jax

from flaxen.attention import Scene
from flaxen.cache import NewTokens
from flaxen.core.tree import module, static
from flaxen.layers.rope import Rope
from flaxen.layers.runtime import PLAIN, Runtime


@module
class Context:
    """positions: (B, T) for rotary embeddings; rotary: (cos, sin) for each of `ropes`; at: what
    enters the cache, and where, with a cache.
    """

    positions: jax.Array
    scene: Scene
    rotary: tuple[tuple[jax.Array, jax.Array], ...]
    at: NewTokens | None = None
    ropes: static[tuple[Rope, ...]] = ()
    runtime: static[Runtime] = PLAIN

    def rotation(self, rope: Rope) -> tuple[jax.Array, jax.Array]:
        """cos and sin of a rope at this context's positions, (B, T, half), computed once for all
        layers.
        """
        return self.rotary[self.ropes.index(rope)]

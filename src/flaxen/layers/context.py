"""What every layer may look at besides the residual stream."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from flaxen.attention import Scene
from flaxen.cache import NewTokens
from flaxen.core.tree import module, static
from flaxen.layers.rope import Rope
from flaxen.layers.runtime import PLAIN, Runtime


@module
class Memory:
    """Another sequence that a layer may look at.

    states: (B, S, D), None where layers have its keys already; scene: where their queries and its
    keys stand, and which of these exist.
    """

    states: jax.Array | None
    scene: Scene


@module
class Context:
    """positions: (B, T) for rotary embeddings; rotary: (cos, sin) for each of `ropes`; at: what
    enters the cache, and where, with a cache; dropout_key: there while training, another for each
    layer; bias: (B or 1, N, T, S), for layers that add it to their scores; memory: what cross
    attention looks at.
    """

    positions: jax.Array
    scene: Scene
    rotary: tuple[tuple[jax.Array, jax.Array], ...]
    at: NewTokens | None = None
    dropout_key: jax.Array | None = None
    bias: jax.Array | None = None
    memory: Memory | None = None
    ropes: static[tuple[Rope, ...]] = ()
    runtime: static[Runtime] = PLAIN

    def of_layer(self, number: Any) -> Context:
        """What one layer (or part of one) looks at: its own randomness, if there is any."""
        if self.dropout_key is None:
            return self
        return dataclasses.replace(self, dropout_key=jax.random.fold_in(self.dropout_key, number))

    def rotation(self, rope: Rope) -> tuple[jax.Array, jax.Array]:
        """cos and sin of a rope at this context's positions, (B, T, half), computed once for all
        layers.
        """
        return self.rotary[self.ropes.index(rope)]

"""From what a vision model makes of patches to tokens of a text model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.dot import dot
from flaxen.core.tree import module, static
from flaxen.layers.linear import Linear
from flaxen.layers.mlp import ACTIVATIONS
from flaxen.layers.norm import Identity


@module
class Merger:
    """Neighbouring patches become one token of the text model: last(gelu(first(norm(x))))."""

    norm: Any
    first: Linear
    last: Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        """(N, D) -> (M, D'); patches of one token stand together."""
        together = self.norm(x).reshape(-1, self.first.weight.shape[-1])
        return self.last(ACTIVATIONS["gelu"](self.first(together)))


@module
class Projector:
    """LLaVA's: linear_2(act(linear_1(x))), each patch by itself; (..., D) -> (..., D')."""

    linear_1: Linear
    linear_2: Linear
    act: static[str]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear_2(ACTIVATIONS[self.act](self.linear_1(x)))


@module
class PatchMerger:
    """Mistral's: `group` neighbouring patches become one, channel by channel."""

    merging_layer: Linear
    group: static[int]

    def __call__(self, x: jax.Array) -> jax.Array:
        """(N, D) -> (N / group, D); patches of one token stand together."""
        return self.merging_layer(x.reshape(-1, self.group, x.shape[-1]).swapaxes(1, 2))


@module
class MergingProjector(Projector):
    """Mistral 3's: norm and merge before LLaVA's."""

    norm: Any = Identity()
    patch_merger: PatchMerger

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(self.patch_merger(self.norm(x)))


@module
class PooledProjector:
    """Gemma 3's: the mean of each square of patches, normed, times a matrix (D, D').

    side: patches on a side of a picture; tokens: what becomes of them.
    """

    mm_input_projection_weight: Any
    mm_soft_emb_norm: Any
    side: static[int]
    tokens: static[int]

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, side * side, D) -> (B, tokens * tokens, D')."""
        size, n = self.side // self.tokens, self.tokens
        square = x.reshape(len(x), self.side, self.side, -1)[:, : n * size, : n * size]
        means = jnp.mean(square.reshape(len(x), n, size, n, size, -1), (2, 4))
        flat = self.mm_soft_emb_norm(means.reshape(len(x), n * n, -1))
        return dot(flat, self.mm_input_projection_weight.T)

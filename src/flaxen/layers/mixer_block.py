"""A layer with one sublayer."""

from __future__ import annotations

from typing import Any

import jax

from flaxen.core.tree import module
from flaxen.layers.context import Context


@module
class MixerBlock:
    """x + mixer(norm(x)): the mixer does the work of a feed-forward network, too."""

    mixer: Any
    input_layernorm: Any

    @property
    def self_attn(self) -> Any:
        """What has a cache, as in other blocks."""
        return self.mixer

    def __call__(self, x: jax.Array, ctx: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """x (B, T, D) -> (B, T, D), and this layer's cache."""
        y, cache = self.mixer(self.input_layernorm(x), ctx, cache)
        x = x + y
        if ctx.runtime.constrain_blocks:
            x = ctx.runtime.constrain(x, "batch", "seq", "embed")
        return x, cache

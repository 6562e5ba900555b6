"""Attention whose queries and keys come to know in another way where they stand."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, static
from flaxen.layers.attention import Attention, rotated
from flaxen.layers.context import Context
from flaxen.layers.positions import chunk_slots


@module
class NormedAfterRotation(Attention):
    """The norms of queries and keys come after their rotation (Llama 4, HunYuan)."""

    def placed(self, q: jax.Array, k: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        if self.rope is not None:
            q, k = rotated(q, ctx, self.rope), rotated(k, ctx, self.rope)
        return self.q_norm(q), self.k_norm(k)


@module
class Tempered(Attention):
    """Queries grow with their slot: by `growth` times the logarithm of how many `floor`s fit before
    it, plus one (Llama 4; arXiv 2501.19399). Padding counts as slots, too; other documents do not.
    """

    growth: static[float]
    floor: static[float]

    def placed(self, q: jax.Array, k: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        q, k = Attention.placed(self, q, k, ctx)
        first = 0 if ctx.at is None else ctx.at.slot
        slots = first + chunk_slots(q.shape[1], segments=ctx.scene.q_segments)
        counted = (slots.astype(jnp.float32) + 1) / self.floor
        grown = jnp.log1p(jnp.floor(counted)) * self.growth + 1
        return (q * grown[..., None, None]).astype(q.dtype), k

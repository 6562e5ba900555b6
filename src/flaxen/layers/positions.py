"""Positions that are not learned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.tree import module, static


@module
class WavePositions:
    """Sines, then cosines, of ever longer waves (arXiv 1706.03762): no weights, and no file needs
    them. NaN past the last position.
    """

    count: static[int]
    embed: static[int]

    def __call__(self, positions: jax.Array) -> jax.Array:
        """positions (B, T) -> (B, T, D)."""
        known, table = positions < self.count, jnp.asarray(waves(self.count, self.embed))
        return jnp.where(known[..., None], table[positions], jnp.nan)


def waves(positions: int, channels: int) -> np.ndarray:
    """Sines in the first half of the channels, cosines in the second, float32."""
    each = np.arange(positions)[:, None] / 10000 ** (2 * np.arange(-(-channels // 2)) / channels)
    both = np.concatenate([np.sin(each), np.cos(each[:, : channels // 2])], axis=1)
    return both.astype(np.float32)


def chunk_slots(
    length: int, keep: jax.Array | None = None, segments: jax.Array | None = None
) -> jax.Array:
    """Slots counted from the first token of a row, and of each document, as chunks are: (T,) or
    (B, T). keep (B, T) is False for padding.
    """
    index = jnp.arange(length, dtype=jnp.int32)
    first = jnp.zeros_like(index)
    if segments is not None:
        begins = jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0
        first = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    if keep is not None:
        # Padding on the left stands before the first slot.
        first = jnp.maximum(first, jnp.argmax(keep, axis=1, keepdims=True).astype(jnp.int32))
    return index - first

"""A feed-forward network over pieces of the sequence: its inner width times all tokens is never
held.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from flaxen.layers.context import Context
from flaxen.layers.listening import is_heard, listening, tell

Network = Callable[[jax.Array, Context], jax.Array]


def feed_forward(mlp: Network, x: jax.Array, ctx: Context) -> jax.Array:
    """mlp(x), x (B, T, D) -> (B, T, D), as the settings of `ctx` say: at once, or piece by piece.

    Each token goes through the network alone, so the numbers are the same. The backward pass
    computes each piece again. Pieces are of one size, with less than one token in a piece to spare.
    """
    settings, (B, T, D) = ctx.runtime.mlp, x.shape
    if not settings.scan or settings.chunk >= T:
        return mlp(x, ctx)
    pieces = -(-T // settings.chunk)
    size = -(-T // pieces)
    # Strided, as a contiguous piece of a sequence that a mesh cuts would sit on few devices.
    padded = jnp.pad(x, [(0, 0), (0, pieces * size - T), (0, 0)]).reshape(B, size, pieces, D)

    @jax.checkpoint
    def one(piece: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        with listening(is_heard()) as scores:
            y = mlp(ctx.runtime.constrain(piece, "batch", "seq", "embed"), ctx)
        return y, tuple(scores)

    y, scores = jax.lax.map(one, jnp.moveaxis(padded, 2, 0))
    joined = lambda y: jnp.moveaxis(y, 0, 2).reshape(B, pieces * size, -1)[:, :T]
    tell(*map(joined, scores))
    return joined(y)

"""What recurrent mixers share: the tokens of a row without its padding, states that are remembered,
and long sequences in pieces.

B batch, T tokens, L tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.cache import Recurrent
from flaxen.core.tree import module
from flaxen.layers.context import Context
from flaxen.layers.runtime import Runtime

PIECE = 64
"""Tokens whose relations are computed at once, as a table."""


@module
class Line:
    """The new tokens of each row, padding moved behind them.

    order: (B, T) where each comes from and back: where it goes to, None where none is moved.
    real: (B, T) False for padding, None without any; starts: (B, T) the first tokens of packed
    documents, None where a row is one; count: (B,) real tokens.
    """

    order: jax.Array | None
    back: jax.Array | None
    real: jax.Array | None
    starts: jax.Array | None
    count: jax.Array

    def together(self, x: jax.Array) -> jax.Array:
        """x (B, T, D) in the order of the line."""
        return x if self.order is None else jnp.take_along_axis(x, self.order[..., None], 1)

    def apart(self, y: jax.Array) -> jax.Array:
        """Undo `together`."""
        return y if self.back is None else jnp.take_along_axis(y, self.back[..., None], 1)

    def masked(self, x: jax.Array) -> jax.Array:
        """x (B, T, ...) with zeros for padding."""
        if self.real is None:
            return x
        return jnp.where(self.real.reshape(*self.real.shape, *[1] * (x.ndim - 2)), x, 0)

    @property
    def documents(self) -> jax.Array | None:
        """(B, T): the number of each token's document in its row."""
        return None if self.starts is None else jnp.cumsum(self.starts, 1, dtype=jnp.int32)


def line_of(ctx: Context, shape: tuple[int, ...]) -> Line:
    """The line of the tokens (B, T) that a layer is given."""
    B, T = shape
    real = ctx.scene.keep if ctx.at is None else ctx.at.valid
    segments = ctx.scene.q_segments if ctx.at is None else None
    if real is None:
        starts = None if segments is None else _starts(segments)
        return Line(order=None, back=None, real=None, starts=starts, count=jnp.full(B, T))
    count = real.sum(1, dtype=jnp.int32)
    if T == 1:
        return Line(order=None, back=None, real=real, starts=None, count=count)
    behind = count[:, None] + jnp.cumsum(~real, 1, dtype=jnp.int32) - 1
    back = jnp.where(real, jnp.cumsum(real, 1, dtype=jnp.int32) - 1, behind)
    index = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), shape)
    order = jnp.put_along_axis(jnp.zeros_like(index), back, index, 1, inplace=False)
    starts = None
    if segments is not None:
        starts = _starts(jnp.take_along_axis(segments, order, 1))
    return Line(order=order, back=back, real=index < count[:, None], starts=starts, count=count)


def _starts(segments: jax.Array) -> jax.Array:
    return jnp.diff(segments, axis=1, prepend=segments[:, :1]) != 0


Past = tuple[tuple[jax.Array, ...], jax.Array | None]
"""The last inputs of each convolution, and the state."""


class Mixer:
    """A layer that goes from token to token with a state: `mix` is all that kinds differ in.

    Padding, wherever it stands in a row, and other documents of a row never touch the state.
    """

    def mix(
        self, x: jax.Array, line: Line, past: Past | None, runtime: Runtime
    ) -> tuple[jax.Array, Past]:
        """x (B, T, D) in the order of the line, and what was remembered before it -> the same
        shape, and what is remembered after it.
        """
        raise NotImplementedError

    def __call__(
        self, x: jax.Array, ctx: Context, cache: Recurrent | None = None
    ) -> tuple[jax.Array, Recurrent | None]:
        """x (B, T, D) -> (B, T, D), and the cache with the newest state in it."""
        line = line_of(ctx, x.shape[:2])
        # Each token needs the one before it: where a plan cuts the sequence, it is gathered here.
        x = line.together(ctx.runtime.constrain(x, "batch", "tokens", "embed"))
        past = None
        if cache is not None and ctx.at is not None:
            before = ctx.at.lengths > line.count
            past = jax.tree.map(lambda old: _where(before, old), cache.states())
        y, new = self.mix(x, line, past, ctx.runtime)
        if cache is not None and ctx.at is not None:
            cache = cache.append(*new, ctx.at)
        return line.apart(y), cache


def _where(rows: jax.Array, old: jax.Array) -> jax.Array:
    """Rows that have no tokens yet begin with zeros, whatever stands in the cache."""
    return jnp.where(rows.reshape(-1, *[1] * (old.ndim - 1)), old, 0)


def in_pieces(
    step: Callable[[Any, Any], tuple[Any, jax.Array]], carry: Any, xs: Any, size: int = PIECE
) -> tuple[Any, jax.Array]:
    """`step(carry, piece) -> carry, y` over pieces of `size` tokens of `xs`, leaves (B, T, ...);
    gives the last carry and all y, (B, T, ...). What is missing in the last piece is zeros.

    The backward pass computes each piece again from the carry before it, so that of what a piece
    needs in between, only one is held.
    """
    B, T = jax.tree.leaves(xs)[0].shape[:2]
    if size >= T:
        return step(carry, xs)
    count = -(-T // size)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, 0), (0, count * size - T), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(B, count, size, *x.shape[2:]), 1, 0)

    # In a scan, nothing needs to keep the compiler from sharing work between the passes.
    carry, y = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), carry, jax.tree.map(cut, xs))
    return carry, jnp.moveaxis(y, 0, 1).reshape(B, count * size, *y.shape[3:])[:, :T]


def wide(x: jax.Array) -> jax.Array:
    """In float32, or more exact."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))

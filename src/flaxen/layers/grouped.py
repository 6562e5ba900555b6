"""Rows times the matrix of the group they belong to: the product inside a mixture of experts.

Letters: R rows, G groups, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.dot import product
from flaxen.core.platform import platform

MOST_ROWS = 128
"""Rows of a block: from here on a product is bound by arithmetic, whatever its weight costs."""

_ROWS_ARE_RAGGED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


def grouped_dot(x: jax.Array, weight: Any, sizes: jax.Array) -> jax.Array:
    """Rows that lie group by group, each times its group's matrix.

    x (R, I), weight (G, O, I), sizes (G,) rows of each group -> (R, O) in at least float32. Rows
    past the last group's give no meaningful numbers, and their gradient must be zero.
    """
    weight = jnp.asarray(weight, x.dtype)
    if platform() == "cpu":
        return _in_blocks(x, weight, sizes)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.ragged_dot_general(
        x, weight, sizes, _ROWS_ARE_RAGGED, preferred_element_type=wide
    )


@jax.custom_vjp
def _in_blocks(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """Block by block of rows of one group. XLA on CPU multiplies every row of a ragged product with
    every group.
    """
    return _blocks_dot(x, weight, sizes, over=1)


def _in_blocks_fwd(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> Any:
    return _in_blocks(x, weight, sizes), (x, weight, sizes)


def _in_blocks_bwd(kept: Any, grad: jax.Array) -> Any:
    x, weight, sizes = kept
    grad = grad.astype(x.dtype)
    dx = _blocks_dot(grad, weight, sizes, over=0)
    dw = _blocks_outer(grad, x, sizes)
    return dx.astype(x.dtype), dw.astype(weight.dtype), None


_in_blocks.defvjp(_in_blocks_fwd, _in_blocks_bwd)


def _blocks_dot(x: jax.Array, weight: jax.Array, sizes: jax.Array, over: int) -> jax.Array:
    """Contract the columns of `x` with axis `over` of each group's matrix."""
    height = _height(x, sizes)
    padded = jnp.pad(x, [(0, height), (0, 0)])
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def block(y: jax.Array, group: jax.Array, row: jax.Array, end: jax.Array) -> jax.Array:
        # What it writes below its group's last row, the next group's first block writes again.
        rows = jax.lax.dynamic_slice_in_dim(padded, row, height)
        part = product(rows, weight[group], (((1,), (over,)), ((), ())))
        return jax.lax.dynamic_update_slice_in_dim(y, part, row, 0)

    y = jnp.zeros((len(padded), weight.shape[2 - over]), wide)
    return _each_block(block, y, sizes, height)[: len(x)]


def _blocks_outer(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    """a (R, O), b (R, I) -> for each group the sum of its rows' outer products, (G, O, I)."""
    height = _height(a, sizes)
    a, b = (jnp.pad(x, [(0, height), (0, 0)]) for x in (a, b))
    wide = jnp.promote_types(a.dtype, jnp.float32)

    def block(sums: jax.Array, group: jax.Array, row: jax.Array, end: jax.Array) -> jax.Array:
        left, right = (jax.lax.dynamic_slice_in_dim(x, row, height) for x in (a, b))
        ours = (row + jnp.arange(height) < end)[:, None]
        part = product(jnp.where(ours, left, 0), right, (((0,), (0,)), ((), ())))
        return sums.at[group].add(part)

    sums = jnp.zeros((len(sizes), a.shape[1], b.shape[1]), wide)
    return _each_block(block, sums, sizes, height)


def _height(x: jax.Array, sizes: jax.Array) -> int:
    """Rows of a block: a group's fair share, rounded up to a power of two."""
    share = -(-len(x) // len(sizes))
    return min(MOST_ROWS, 1 << (share - 1).bit_length())


def _each_block(
    block: Callable[..., jax.Array], start: jax.Array, sizes: jax.Array, height: int
) -> jax.Array:
    """`block(carry, group, first row, the group's end)` for all blocks, by rising rows."""
    counts = -(-sizes // height)
    ends, last = jnp.cumsum(sizes), jnp.cumsum(counts)

    def step(i: jax.Array, carry: jax.Array) -> jax.Array:
        group = jnp.searchsorted(last, i, side="right")
        nth = i - (last - counts)[group]
        return block(carry, group, (ends - sizes)[group] + nth * height, ends[group])

    return jax.lax.fori_loop(0, last[-1], step, start)

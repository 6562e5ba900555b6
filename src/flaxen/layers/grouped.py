"""Rows times the matrix of the group they belong to: the product inside a mixture of experts.

Letters: R rows, G groups, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    past the last group's give no meaningful numbers, and their gradient must be zero. A leaf in
    place of the weight has no gradient.
    """
    cpu = platform() == "cpu"
    if _is_array(weight) or not cpu:
        weight = jnp.asarray(weight if _is_array(weight) else weight.values(), x.dtype)
    if cpu:
        return _in_blocks(x, weight, sizes)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.ragged_dot_general(
        x, weight, sizes, _ROWS_ARE_RAGGED, preferred_element_type=wide
    )


def _is_array(weight: Any) -> bool:
    return isinstance(weight, jax.Array | np.ndarray)


def _matrix(weight: Any, group: jax.Array, dtype: Any) -> jax.Array:
    """The matrix of one group; of a leaf, worked out for the block that needs it."""
    return weight[group] if _is_array(weight) else weight[group].values().astype(dtype)


@jax.custom_vjp
def _in_blocks(x: jax.Array, weight: Any, sizes: jax.Array) -> jax.Array:
    """Block by block of rows of one group. XLA on CPU multiplies every row of a ragged product with
    every group.
    """
    height = _height(x, sizes)
    padded, wide = _padded(x, height), jnp.promote_types(x.dtype, jnp.float32)

    def block(y: jax.Array, group: jax.Array, row: jax.Array, end: jax.Array) -> jax.Array:
        rows, matrix = _rows(padded, row, height), _matrix(weight, group, x.dtype)
        part = product(rows, matrix, (((1,), (1,)), ((), ())))
        return _written(y, part, row)

    y = jnp.zeros((len(padded), weight.shape[1]), wide)
    return _each_block(block, y, sizes, height)[: len(x)]


def _in_blocks_fwd(x: jax.Array, weight: Any, sizes: jax.Array) -> Any:
    return _in_blocks(x, weight, sizes), (x, weight, sizes)


def _in_blocks_bwd(kept: Any, grad: jax.Array) -> Any:
    x, weight, sizes = kept
    height = _height(x, sizes)
    rows, grads = _padded(x, height), _padded(grad.astype(x.dtype), height)
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def block(sums: Any, group: jax.Array, row: jax.Array, end: jax.Array) -> Any:
        dx, dw = sums
        g = _rows(grads, row, height)
        dx = _written(
            dx, product(g, _matrix(weight, group, x.dtype), (((1,), (0,)), ((), ()))), row
        )
        if dw is None:
            return dx, None
        ours = (row + jnp.arange(height) < end)[:, None]
        outer = (((0,), (0,)), ((), ()))
        dw = dw.at[group].add(product(jnp.where(ours, g, 0), _rows(rows, row, height), outer))
        return dx, dw

    sums = jnp.zeros(weight.shape, wide) if _is_array(weight) else None
    dx, dw = _each_block(block, (jnp.zeros(rows.shape, wide), sums), sizes, height)
    return dx[: len(x)].astype(x.dtype), None if dw is None else dw.astype(weight.dtype), None


_in_blocks.defvjp(_in_blocks_fwd, _in_blocks_bwd)


def _padded(x: jax.Array, height: int) -> jax.Array:
    return jnp.pad(x, [(0, height), (0, 0)])


def _rows(x: jax.Array, row: jax.Array, height: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, row, height)


def _written(y: jax.Array, part: jax.Array, row: jax.Array) -> jax.Array:
    # What it writes below its group's last row, the next group's first block writes again.
    return jax.lax.dynamic_update_slice_in_dim(y, part, row, 0)


def _height(x: jax.Array, sizes: jax.Array) -> int:
    """Rows of a block: a group's fair share, rounded up to a power of two."""
    share = -(-len(x) // len(sizes))
    return min(MOST_ROWS, 1 << (share - 1).bit_length())


def _each_block(block: Callable[..., Any], start: Any, sizes: jax.Array, height: int) -> Any:
    """`block(carry, group, first row, the group's end)` for all blocks, by rising rows."""
    counts = -(-sizes // height)
    ends, last = jnp.cumsum(sizes), jnp.cumsum(counts)

    def step(i: jax.Array, carry: Any) -> Any:
        group = jnp.searchsorted(last, i, side="right")
        nth = i - (last - counts)[group]
        return block(carry, group, (ends - sizes)[group] + nth * height, ends[group])

    return jax.lax.fori_loop(0, last[-1], step, start)

"""Rows times the matrix of the group they belong to: the product inside a mixture of experts.

Letters: R rows, G groups, O outputs, I inputs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.platform import platform

LANES = 128
"""What both axes of a matrix divide by for the kernel of TPUs to take it."""

_ROWS_ARE_RAGGED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


def grouped_dot(x: jax.Array, weight: Any, sizes: jax.Array) -> jax.Array:
    """Rows that lie group by group, each times its group's matrix.

    x (R, I), weight (G, O, I), sizes (G,) rows of each group -> (R, O) in at least float32. Rows
    past the last group's give no meaningful numbers, and their gradient must be zero.

    On TPU it is jax's megablox kernel, for 16 and 32 bits and matrices that can be cut into tiles;
    elsewhere, and else, XLA's ragged product. XLA on CPU multiplies every row of that with every
    group: see `expert_blocks`.
    """
    stored = isinstance(weight, jax.Array | np.ndarray)
    weight = jnp.asarray(weight if stored else weight.values(), x.dtype)
    if platform() == "tpu" and has_tiles(x.dtype, weight.shape):
        return in_tiles(x, weight, sizes)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.ragged_dot_general(
        x, weight, sizes, _ROWS_ARE_RAGGED, preferred_element_type=wide
    )


def has_tiles(dtype: Any, shape: tuple[int, ...]) -> bool:
    """Whether megablox takes matrices (G, O, I) of this dtype."""
    return dtype in (jnp.bfloat16, jnp.float32) and all(n % LANES == 0 for n in shape[1:])


def in_tiles(
    x: jax.Array, weight: jax.Array, sizes: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """`grouped_dot` by megablox; `interpret` runs its kernels anywhere, slowly."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    rows, (groups, outputs, inputs) = len(x), weight.shape
    high = LANES if rows < 2 * LANES * groups else 2 * LANES
    # It never writes rows past the last group's, in the gradient neither.
    ours = (jnp.arange(rows) < sizes.sum())[:, None]
    padded = jnp.pad(jnp.where(ours, x, 0), [(0, -rows % high), (0, 0)])
    tiling = (high, min(4 * LANES, inputs), min(4 * LANES, outputs))
    y = gmm(
        padded,
        weight,
        sizes.astype(jnp.int32),
        jnp.float32,
        tiling,
        transpose_rhs=True,
        interpret=interpret,
    )
    return y[:rows]

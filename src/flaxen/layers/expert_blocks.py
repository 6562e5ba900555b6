"""Experts on CPU: block by block of the tokens of one expert, whose whole network a block goes
through while it is in the cache. Nothing as large as all tokens times their experts is ever held.

Letters: N tokens, R pairs of a token and one of its experts, G experts, D embed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.dot import is_leaf_type

MOST_ROWS = 128
"""Rows of a block: from here on a product is bound by arithmetic, whatever its weight costs."""

Alone = Callable[[Any, jax.Array, jax.Array], jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_of_experts(
    alone: Alone, experts: Any, x: jax.Array, shares: jax.Array, tokens: jax.Array, sizes: jax.Array
) -> jax.Array:
    """What the experts of each token make of it, summed: (N, D) in at least float32.

    alone(expert, rows, shares) is one expert's results (rows, D), weighed by shares (rows, 1).
    experts: a tree whose leaves have G in front; x (N, D); shares (R,) and tokens (R,), numbers of
    rows of x, lie expert by expert, sizes (G,) of each; pairs past the last expert's count for
    nothing. Leaves that are no arrays have no gradient. The backward pass computes each block
    again.
    """
    height = _height(len(tokens), len(sizes))
    tokens, shares = _padded(tokens, height, len(x)), _padded(shares, height, 0)

    def block(y: jax.Array, group: jax.Array, row: jax.Array, end: jax.Array) -> jax.Array:
        ids, share = _rows(tokens, row, height), _rows(shares, row, height)[:, None]
        part = alone(_of_group(experts, group, x.dtype), _taken(x, ids), share)
        return _added(y, ids, jnp.where(_ours(row, height, end), part, 0))

    y = jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
    return _each_block(block, y, sizes, height)


def _forward(alone: Alone, *args: Any) -> tuple[jax.Array, Any]:
    return sum_of_experts(alone, *args), args


def _backward(alone: Alone, kept: Any, grad: jax.Array) -> tuple[Any, ...]:
    experts, x, shares, tokens, sizes = kept
    height, pairs = _height(len(tokens), len(sizes)), len(tokens)
    tokens, shares = _padded(tokens, height, len(x)), _padded(shares, height, 0)
    leaves, structure = jax.tree.flatten(experts, is_leaf=_is_leaf)
    wide = lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))
    start = [wide(leaf) if _is_array(leaf) else None for leaf in leaves]

    def block(sums: Any, group: jax.Array, row: jax.Array, end: jax.Array) -> Any:
        dx, dshares, dleaves = sums
        ids, share = _rows(tokens, row, height), _rows(shares, row, height)[:, None]
        expert = _of_group(experts, group, x.dtype)
        part, back = jax.vjp(alone, expert, _taken(x, ids), share)
        ours = jnp.where(_ours(row, height, end), _taken(grad, ids), 0)
        dexpert, drows, dshare = back(ours.astype(part.dtype))
        # What stands below this expert's last row, the next one's first block writes again.
        dshares = jax.lax.dynamic_update_slice_in_dim(dshares, dshare[:, 0], row, 0)
        pairs = zip(dleaves, structure.flatten_up_to(dexpert), strict=True)
        dleaves = [s if s is None else s.at[group].add(d) for s, d in pairs]
        return _added(dx, ids, drows), dshares, dleaves

    dx, dshares, dleaves = _each_block(block, (wide(x), wide(shares), start), sizes, height)
    used = jnp.arange(pairs) < sizes.sum()
    cast = lambda d, leaf: None if d is None else d.astype(leaf.dtype)
    dexperts = structure.unflatten(map(cast, dleaves, leaves))
    dshares = jnp.where(used, dshares[:pairs], 0).astype(shares.dtype)
    return dexperts, dx.astype(x.dtype), dshares, None, None


sum_of_experts.defvjp(_forward, _backward)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_leaf(part: Any) -> bool:
    return _is_array(part) or is_leaf_type(part)


def _of_group(experts: Any, group: jax.Array, dtype: Any) -> Any:
    """One expert; what is stored otherwise than as an array is worked out for the block alone."""

    def one(leaf: Any) -> jax.Array:
        part = jnp.asarray(leaf)[group] if _is_array(leaf) else leaf[group].values()
        return part.astype(dtype)

    return jax.tree.map(one, experts, is_leaf=_is_leaf)


def _padded(x: jax.Array, height: int, empty: int) -> jax.Array:
    return jnp.pad(x, (0, height), constant_values=empty)


def _rows(x: jax.Array, row: jax.Array, height: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, row, height)


def _ours(row: jax.Array, height: int, end: jax.Array) -> jax.Array:
    return (row + jnp.arange(height) < end)[:, None]


def _taken(x: jax.Array, ids: jax.Array) -> jax.Array:
    return x.at[ids].get(mode="clip")


def _added(y: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    return y.at[ids].add(rows.astype(y.dtype), mode="drop")


def _height(rows: int, groups: int) -> int:
    """Rows of a block: a group's fair share, rounded up to a power of two."""
    share = -(-rows // groups)
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

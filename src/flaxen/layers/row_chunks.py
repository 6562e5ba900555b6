"""A function of rows, run on a few of them at a time and computed again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.layers.cross_entropy import added, as_leaf, zeros_for

Rowwise = Callable[[Any, Any, Any, Any], Any]
"""(rows, shared, still rows, still shared) -> a tree of arrays with the rows in front."""


def in_chunks(
    function: Rowwise,
    rows: Any,
    shared: Any,
    still_rows: Any = (),
    still_shared: Any = (),
    *,
    chunk: int = 256,
) -> Any:
    """`function` of all rows, `chunk` at a time; what it makes between is never held for more.

    Gradients are those of `rows` and `shared`, the latter summed in float32; integers and what is
    not learned from are `still`. function: closes over no array.
    """
    count = jax.tree.leaves(rows)[0].shape[0]
    chunk = min(chunk, max(count, 1))
    chunks = -(-count // chunk)

    # A strided chunk holds rows of every device's shard; a contiguous one would sit on few devices.
    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, chunk * chunks - count)] + [(0, 0)] * (x.ndim - 1))
        return jnp.swapaxes(x.reshape(chunk, chunks, *x.shape[1:]), 0, 1)

    def joined(y: jax.Array) -> jax.Array:
        return jnp.swapaxes(y, 0, 1).reshape(chunk * chunks, *y.shape[2:])[:count]

    rows, still_rows = jax.tree.map(split, (rows, still_rows))
    return jax.tree.map(joined, _mapped(function, rows, shared, (still_rows, still_shared)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mapped(function: Rowwise, rows: Any, shared: Any, still: Any) -> Any:
    return jax.lax.map(lambda each: function(each[0], shared, each[1], still[1]), (rows, still[0]))


def _mapped_fwd(function: Rowwise, rows: Any, shared: Any, still: Any) -> Any:
    return _mapped(function, rows, shared, still), (rows, shared, still)


def _mapped_bwd(function: Rowwise, kept: Any, grads: Any) -> Any:
    rows, shared, (still_rows, still_shared) = kept

    def step(sums: Any, each: Any) -> Any:
        rows, fixed, grads = each
        _, pull = jax.vjp(
            lambda rows, shared: function(rows, shared, fixed, still_shared), rows, shared
        )
        drows, dshared = pull(grads)
        return jax.tree.map(added, sums, dshared), drows

    start = jax.tree.map(zeros_for, shared)
    sums, drows = jax.lax.scan(step, start, (rows, still_rows, grads))
    return drows, jax.tree.map(as_leaf, sums, shared), None


_mapped.defvjp(_mapped_fwd, _mapped_bwd)

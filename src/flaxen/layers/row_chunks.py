"""A function of rows, run on a few of them at a time and computed again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from flaxen.layers.cross_entropy import added, as_leaf, zeros_for
from flaxen.layers.row_shards import RowShards

Rowwise = Callable[[Any, Any, Any, Any], Any]
"""(rows, shared, still rows, still shared) -> a tree of arrays with the rows in front."""


def in_chunks(
    function: Rowwise,
    rows: Any,
    shared: Any,
    still_rows: Any = (),
    still_shared: Any = (),
    *,
    shards: RowShards,
    chunk: int = 256,
) -> Any:
    """`function` of all rows, `chunk` at a time; what it makes between is never held for more.

    rows, still_rows: (rows..., more...), where rows are those of `shards`; shared: the weight and
    bias of scores. Each shard takes `chunk` of its own rows at a time, and holds `shared` and its
    own sum of their gradients whole, which are added up over shards once. Gradients are those of
    `rows` and `shared`, the latter summed in float32; integers and what is not learned from are
    `still`. function: closes over no array.
    """
    rows, still_rows = jax.tree.map(lambda x: shards.pieces(x, chunk), (rows, still_rows))
    made = _mapped(shards, function, rows, shared, (still_rows, still_shared))
    return jax.tree.map(shards.whole, made)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mapped(shards: RowShards, function: Rowwise, rows: Any, shared: Any, still: Any) -> Any:
    def own(rows: Any, shared: Any) -> Any:
        shared, still = shared
        return jax.lax.map(lambda each: function(each[0], shared, each[1], still), rows), None

    return shards.run(own, (rows, still[0]), (shared, still[1]))[0]


def _mapped_fwd(shards: RowShards, function: Rowwise, rows: Any, shared: Any, still: Any) -> Any:
    return _mapped(shards, function, rows, shared, still), (rows, shared, still)


def _mapped_bwd(shards: RowShards, function: Rowwise, kept: Any, grads: Any) -> Any:
    rows, shared, (still_rows, still_shared) = kept

    def step(whole: Any, sums: Any, each: Any) -> Any:
        (rows, fixed, grads), (shared, still) = each, whole
        _, pull = jax.vjp(lambda rows, shared: function(rows, shared, fixed, still), rows, shared)
        drows, dshared = pull(grads)
        return jax.tree.map(added, sums, dshared), drows

    def own(rows: Any, whole: Any) -> Any:
        start = jax.tree.map(zeros_for, whole[0])
        sums, drows = jax.lax.scan(functools.partial(step, whole), start, rows)
        return drows, sums

    each = rows, still_rows, grads
    drows, sums = shards.run(own, each, (shared, still_shared), shards.stored(shared))
    return drows, jax.tree.map(as_leaf, sums, shared), None


_mapped.defvjp(_mapped_fwd, _mapped_bwd)

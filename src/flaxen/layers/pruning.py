"""Layers with fewer channels, and attention with fewer heads. Nothing is changed in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import InputError
from flaxen.layers.attention import Attention
from flaxen.layers.conv1d import Conv1D
from flaxen.layers.linear import Linear


def prune_linear_layer(layer: Linear, index: Any, dim: int = 0) -> Linear:
    """A projection with only the channels `index`, in that order, of its outputs (`dim` 0) or of
    its inputs (`dim` 1).

    index counts channels of a side as in the file, where heads and their channels are one
    dimension; then it must keep heads whole.

    Raises:
        InputError: for an index outside of the layer, or one that cuts through a head.
    """
    split = _array(layer.weight).ndim - layer.contract
    sides = layer.weight.shape[:split], layer.weight.shape[split:]
    if dim == 0:
        weight = _keep(layer.weight, sides[0], index, 0)
        bias = None if layer.bias is None else _keep(layer.bias, sides[0], index, 0)
        return dataclasses.replace(layer, weight=weight, bias=bias)
    return dataclasses.replace(layer, weight=_keep(layer.weight, sides[1], index, split))


def prune_conv1d_layer(layer: Conv1D, index: Any, dim: int = 1) -> Conv1D:
    """A `Conv1D` with only the channels `index`, in that order, of its outputs (`dim` 1) or of its
    inputs (`dim` 0).

    Raises:
        InputError: for an index outside of the layer.
    """
    kept = _keep(_array(layer.weight), layer.weight.shape[dim : dim + 1], index, dim)
    bias = _keep(layer.bias, layer.bias.shape, index, 0) if dim == 1 else layer.bias
    return Conv1D(weight=kept, bias=bias)


def prune_layer(layer: Any, index: Any, dim: int | None = None) -> Any:
    """`prune_linear_layer` or `prune_conv1d_layer`; of the outputs unless told.

    Raises:
        InputError: for another kind of layer.
    """
    if isinstance(layer, Linear):
        return prune_linear_layer(layer, index, dim=0 if dim is None else dim)
    if isinstance(layer, Conv1D):
        return prune_conv1d_layer(layer, index, dim=1 if dim is None else dim)
    raise InputError(f"Can't prune layer of class {type(layer).__name__}; expected Linear, Conv1D.")


def find_pruneable_heads_and_indices(
    heads: Iterable[int], n_heads: int, head_size: int, already_pruned_heads: Collection[int]
) -> tuple[set[int], np.ndarray]:
    """Which of `heads` are still there, and the flat channels of those that stay.

    heads are counted as before any pruning, n_heads is how many there are now.
    """
    left = set(heads) - set(already_pruned_heads)
    keep = np.ones((n_heads, head_size), bool)
    keep[[head - sum(h < head for h in already_pruned_heads) for head in left]] = False
    return left, np.flatnonzero(keep)


def prune_heads(attention: Attention, heads: Iterable[int]) -> Attention:
    """Attention without the query heads `heads`; the others compute what they did.

    Query heads that share a key and value head go together.

    Raises:
        InputError: for heads that are not there, for all of them, or for a part of a group.
    """
    if _array(attention.q_proj.weight).ndim != 3:
        raise InputError("These are several layers folded into one: load with scan_layers=False.")
    n_heads, head_dim = attention.q_proj.weight.shape[:2]
    kv_heads, v_dim = attention.v_proj.weight.shape[:2]
    gone, group = sorted(set(heads)), n_heads // kv_heads
    if not all(0 <= head < n_heads for head in gone) or len(gone) == n_heads:
        raise InputError(
            f"Cannot prune heads {gone} of {n_heads}; expected some of 0 to {n_heads - 1}, not all."
        )
    shared = sorted({head // group for head in gone})
    whole = [k * group + i for k in shared for i in range(group)]
    if gone != whole:
        raise InputError(
            f"Cannot prune heads {gone}: each {group} share a key and value head and go together. "
            f"Prune {whole}."
        )
    index = lambda heads, count, size: find_pruneable_heads_and_indices(heads, count, size, ())[1]
    q, k = index(gone, n_heads, head_dim), index(shared, kv_heads, head_dim)
    o, v = index(gone, n_heads, v_dim), index(shared, kv_heads, v_dim)
    return dataclasses.replace(
        attention,
        q_proj=prune_linear_layer(attention.q_proj, q),
        k_proj=prune_linear_layer(attention.k_proj, k),
        v_proj=prune_linear_layer(attention.v_proj, v),
        o_proj=prune_linear_layer(attention.o_proj, o, dim=1),
    )


def _keep(x: Any, side: tuple[int, ...], index: Any, at: int) -> jax.Array:
    """The flat channels `index` of the axes `side`, which stand from axis `at` on."""
    size, block = int(np.prod(side)), int(np.prod(side[1:]))
    index = np.asarray(index, np.int64).reshape(-1)
    if index.size and not -1 < index.min() <= index.max() < size:
        raise InputError(f"index lies between {index.min()} and {index.max()}; channels: {size}.")
    if index.size % block:
        raise InputError(_cut(index, block))
    blocks = index.reshape(-1, block)
    if (blocks != blocks[:, :1] // block * block + np.arange(block)).any():
        raise InputError(_cut(index, block))
    return jnp.take(jnp.asarray(x), blocks[:, 0] // block, axis=at)


def _cut(index: np.ndarray, block: int) -> str:
    return (
        f"index keeps {index.size} channels and cuts through heads of {block}; keep the channels "
        "of a head together, in their order."
    )


def _array(weight: Any) -> Any:
    if not isinstance(weight, jax.Array | np.ndarray):
        raise InputError(
            f"This layer's weight is a {type(weight).__name__}. Prune a layer whose weights are "
            "loaded, before they are quantised or adapted."
        )
    return weight

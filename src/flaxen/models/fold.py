"""Equal layers as one scanned body: compile time does not grow with depth.

Layers whose structure repeats with a period (5 sliding : 1 full) fold too; what is left over at the
end stays a list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.tree import Param, is_param, module, paths, static
from flaxen.layers.context import Context


@module
class Folded:
    """`body` holds one period of layers, each leaf with a leading `layers` axis of `count`; `tail`
    comes after.
    """

    body: list[Any]
    tail: list[Any]
    count: static[int]

    def __len__(self) -> int:
        return self.count * len(self.body) + len(self.tail)


def period(layers: Sequence[Any]) -> int:
    """The smallest p such that layer i is built like layer i + p everywhere; the number of layers
    if there is none.
    """
    kinds = [_kind(layer) for layer in layers]
    return next(
        (p for p in range(1, len(kinds)) if kinds[p:] == kinds[:-p]),
        len(kinds),
    )


def _kind(layer: Any) -> Any:
    leaves, structure = jax.tree.flatten(layer, is_leaf=is_param)
    about = ("shape", "axes", "dtype")
    return structure, [[getattr(leaf, name, None) for name in about] for leaf in leaves]


def fold(layers: Sequence[Any], stack: Callable[[list[Any]], Any]) -> Folded | list[Any]:
    """Stack equal layers with `stack(leaves)`; layers without any repetition stay a list."""
    p = period(layers)
    count = len(layers) // p
    if count < 2:
        return list(layers)
    body = [jax.tree.map(lambda *xs: stack(list(xs)), *layers[i : p * count : p]) for i in range(p)]
    return Folded(body=body, tail=list(layers[p * count :]), count=count)


def unfold(layers: Folded | list[Any], pick: Callable[[Any, int], Any]) -> list[Any]:
    """A plain list again; `pick(leaf, i)` takes layer i out of a stacked leaf."""
    if not isinstance(layers, Folded):
        return list(layers)
    flat = [
        jax.tree.map(lambda x, i=i: pick(x, i), block)
        for i in range(layers.count)
        for block in layers.body
    ]
    return flat + list(layers.tail)


def folded(decoder: Any, stack: Callable[[list[Any]], Any]) -> Any:
    """The decoder with equal layers stacked."""
    return dataclasses.replace(decoder, layers=fold(decoder.layers, stack))


def stack_params(params: list[Param]) -> Param:
    """One weight with a `layers` axis in front."""
    first = params[0]
    return Param({"layers": len(params), **first.axes}, first.layout, first.init, first.dtype)


def one_param(param: Param) -> Param:
    """Undo `stack_params`: the weight of one layer."""
    axes = {name: size for name, size in param.axes.items() if name != "layers"}
    return dataclasses.replace(param, axes=axes)


def in_body(tree: Any) -> Callable[[str], bool]:
    """Whether the leaf at a path of this model has a `layers` axis in front."""
    found = paths(tree, is_leaf=lambda x: isinstance(x, Folded)).items()
    prefixes = tuple(f"{path}.body." for path, x in found if isinstance(x, Folded))
    return lambda path: path.startswith(prefixes)


def run(
    layers: Folded | list[Any], x: jax.Array, ctx: Context, caches: Any, collect: bool
) -> tuple[jax.Array, Any, list[jax.Array]]:
    """All layers in turn. `caches` has the structure of `layers`, or is None; returns x, caches
    and, if `collect`, each layer's output.
    """
    if not isinstance(layers, Folded):
        return _run_list(layers, x, ctx, caches, collect)

    def step(x: jax.Array, each: Any) -> tuple[jax.Array, Any]:
        blocks, cache, first = each
        x, cache, states = _run_list(blocks, x, ctx, cache, collect, first)
        return x, (cache, states)

    past = None if caches is None else caches.body
    firsts = jnp.arange(layers.count) * len(layers.body)
    x, (body, stacked) = jax.lax.scan(step, x, (layers.body, past, firsts), length=layers.count)
    states = [s[i] for i in range(layers.count) for s in stacked]
    first = layers.count * len(layers.body)
    x, tail, more = _run_list(layers.tail, x, ctx, caches and caches.tail, collect, first)
    if caches is not None:
        caches = Folded(body=body, tail=tail, count=layers.count)
    return x, caches, states + more


def _run_list(
    layers: list[Any], x: jax.Array, ctx: Context, caches: Any, collect: bool, first: Any = 0
) -> tuple[jax.Array, Any, list[jax.Array]]:
    """`first` is the index of the first of these layers in the model."""
    new, states = [], []
    call = lambda layer, x, ctx, cache: layer(x, ctx, cache)
    if ctx.runtime.checkpointing.policy and caches is None:
        call = jax.checkpoint(call)
    for i, layer in enumerate(layers):
        x, cache = call(layer, x, ctx.of_layer(first + i), None if caches is None else caches[i])
        new.append(cache)
        if collect:
            states.append(x)
    return x, None if caches is None else new, states

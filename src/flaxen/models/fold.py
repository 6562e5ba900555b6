"""Equal layers as one scanned body: compile time does not grow with depth.

Layers whose structure repeats with a period (5 sliding : 1 full) fold too; what stands before the
repeating part and after it stays a list.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.tree import Param, is_param, module, paths, static
from flaxen.layers.checkpointing import checkpointed
from flaxen.layers.context import Context
from flaxen.layers.listening import is_heard, listening, tell


@module
class Folded:
    """`body` holds one period of layers, each leaf with a leading `layers` axis of `count`; `head`
    comes before, `tail` after.
    """

    head: list[Any] = dataclasses.field(default_factory=list)
    body: list[Any]
    tail: list[Any]
    count: static[int]

    def __len__(self) -> int:
        return len(self.head) + self.count * len(self.body) + len(self.tail)

    def indices(self, part: str, i: int) -> list[int]:
        """Which layers of the model stand at place `i` of `head`, `body` or `tail`."""
        if part == "head":
            return [i]
        first, period = len(self.head) + i, len(self.body)
        if part == "tail":
            return [first + self.count * period]
        return [first + turn * period for turn in range(self.count)]


def repetition(kinds: Sequence[Hashable]) -> tuple[int, int, int]:
    """Where to fold, as (head, period, count): the run of kinds[head:] that repeats with this
    period and leaves the fewest layers apart; the shortest period, then head, of equals.

    A count of 1 says that nothing repeats.
    """
    n, best, saved = len(kinds), (0, max(len(kinds), 1), 1), 0
    for period in range(1, n):
        if n - period <= saved:
            break
        start = 0
        for i in range(n - period + 1):
            if i < n - period and kinds[i] == kinds[i + period]:
                continue
            turns = (i - start) // period
            if turns * period > saved:
                best, saved = (start, period, turns + 1), turns * period
            start = i + 1
    return best


def _kind(layer: Any) -> Hashable:
    leaves, structure = jax.tree.flatten(layer, is_leaf=is_param)
    return structure, tuple(
        (tuple(x.shape), str(x.dtype), tuple(x.axes.items()) if is_param(x) else None)
        for x in leaves
    )


def fold(layers: Sequence[Any], stack: Callable[[list[Any]], Any]) -> Folded | list[Any]:
    """Stack equal layers with `stack(leaves)`; layers without any repetition stay a list."""
    head, period, count = repetition([_kind(layer) for layer in layers])
    if count < 2:
        return list(layers)
    end = head + period * count
    body = [
        jax.tree.map(lambda *xs: stack(list(xs)), *layers[i:end:period])
        for i in range(head, head + period)
    ]
    return Folded(head=list(layers[:head]), body=body, tail=list(layers[end:]), count=count)


def unfold(layers: Folded | list[Any], pick: Callable[[Any, int], Any]) -> list[Any]:
    """A plain list again; `pick(leaf, i)` takes layer i out of a stacked leaf."""
    if not isinstance(layers, Folded):
        return list(layers)
    flat = [_picked(block, pick, i) for i in range(layers.count) for block in layers.body]
    return [*layers.head, *flat, *layers.tail]


def _picked(block: Any, pick: Callable[[Any, int], Any], i: int) -> Any:
    return jax.tree.map(lambda x: pick(x, i), block)


def for_each(layers: Folded | list[Any], make: Callable[..., Any]) -> Any:
    """`make(layer)` in place of each layer, and `make(layer, count)` where `count` are stacked."""
    if not isinstance(layers, Folded):
        return [make(layer) for layer in layers]
    return Folded(
        head=[make(layer) for layer in layers.head],
        body=[make(layer, layers.count) for layer in layers.body],
        tail=[make(layer) for layer in layers.tail],
        count=layers.count,
    )


def folded(model: Any, stack: Callable[[list[Any]], Any]) -> Any:
    """The model with equal layers stacked."""
    return on_layers(model, lambda layers: fold(layers, stack))


def unfolded(model: Any, pick: Callable[[Any, int], Any]) -> Any:
    """The model with lists of layers again, as `unfold` makes them."""
    return on_layers(model, lambda layers: unfold(layers, pick))


def on_layers(model: Any, change: Callable[[Any], Any]) -> Any:
    """The model with `change(layers)` in place of its `layers`, and those of models inside it."""
    changes = {}
    for field in dataclasses.fields(model):
        part = getattr(model, field.name)
        if field.name == "layers":
            changes[field.name] = change(part)
        elif dataclasses.is_dataclass(part) and not is_param(part):
            new = on_layers(part, change)
            changes |= {} if new is part else {field.name: new}
    return dataclasses.replace(model, **changes) if changes else model


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


def plain_paths(tree: Any) -> Callable[[str], tuple[str, ...]]:
    """The paths that a path of this (folded) model has in the one that is not."""
    folds = paths(tree, lambda x: isinstance(x, Folded)).items()
    folded = {path: x for path, x in folds if isinstance(x, Folded)}

    def names(path: str) -> tuple[str, ...]:
        for start, layers in folded.items():
            match = re.fullmatch(rf"{re.escape(start)}\.(head|body|tail)\.(\d+)\.(.*)", path)
            if match:
                at = layers.indices(match[1], int(match[2]))
                return tuple(f"{start}.{i}.{match[3]}" for i in at)
        return (path,)

    return names


def attentions_of(layers: Any, states: Sequence[jax.Array], ctx: Context) -> tuple[jax.Array, ...]:
    """What each layer that has attention looks at, computed again from what it was given; states:
    the residual stream before and after each layer.
    """
    given = enumerate(zip(unfold(layers, lambda x, i: x[i]), states[:-1], strict=True))
    with ctx.runtime.products():
        return tuple(
            layer.attentions(x, ctx.of_layer(i))
            for i, (layer, x) in given
            if hasattr(layer.self_attn, "weights")
        )


def run(
    layers: Folded | list[Any], x: jax.Array, ctx: Context, caches: Any, collect: bool
) -> tuple[jax.Array, Any, list[jax.Array]]:
    """All layers in turn. `caches` has the structure of `layers`, or is None; returns x, caches
    and, if `collect`, each layer's output.
    """
    if not isinstance(layers, Folded):
        return _run_list(layers, x, ctx, caches, collect, 0)
    past = (None,) * 3 if caches is None else (caches.head, caches.body, caches.tail)
    first, last = len(layers.head), len(layers) - len(layers.tail)
    x, head, before = _run_list(layers.head, x, ctx, past[0], collect, 0)
    x, body, inside = _run_body(layers, x, ctx, past[1], collect, first)
    x, tail, after = _run_list(layers.tail, x, ctx, past[2], collect, last)
    if caches is not None:
        caches = Folded(head=head, body=body, tail=tail, count=layers.count)
    return x, caches, before + inside + after


def _run_body(
    layers: Folded, x: jax.Array, ctx: Context, past: Any, collect: bool, first: int
) -> tuple[jax.Array, Any, list[jax.Array]]:
    turns = _turns(layers, ctx, past)
    even = layers.count // turns * turns

    def step(x: jax.Array, each: Any) -> tuple[jax.Array, Any]:
        number, blocks, cache = each
        if turns > 1:
            blocks = [_picked(b, lambda w, i: w[i], turn) for turn in range(turns) for b in blocks]
        passed = number * len(blocks)
        with listening(is_heard()) as scores:
            x, cache, states = _run_list(blocks, x, ctx, cache, collect, first, passed)
        return x, (cache, states, scores)

    body = layers.body
    if turns > 1:
        apart = lambda w: w[:even].reshape(even // turns, turns, *w.shape[1:])
        body = jax.tree.map(apart, layers.body)
    each = jnp.arange(even // turns), body, past
    x, (past, stacked, scores) = jax.lax.scan(step, x, each)
    states = [s[i] for i in range(even // turns) for s in stacked]
    tell(*(s[i] for i in range(even // turns) for s in scores))
    odd = [
        _picked(block, lambda w, i: w[i], i)
        for i in range(even, layers.count)
        for block in layers.body
    ]
    x, _, more = _run_list(odd, x, ctx, None, collect, first + even * len(layers.body))
    return x, past, states + more


def _turns(layers: Folded, ctx: Context, past: Any) -> int:
    """Periods to one step of the scan, so that the same ones of its layers are checkpointed in
    every step.
    """
    how, period = ctx.runtime.checkpointing, len(layers.body)
    if past is not None or how.policy is None:
        return 1
    return math.lcm(period, how.every) // period


def _run_list(
    layers: Sequence[Any],
    x: jax.Array,
    ctx: Context,
    caches: Any,
    collect: bool,
    first: int,
    passed: jax.Array | None = None,
) -> tuple[jax.Array, Any, list[jax.Array]]:
    """Layers one after another, of which the first has the index `first` in the model, or one
    further on by what a scan has `passed`.
    """
    new, states, how = [], [], ctx.runtime.checkpointing

    def call(layer: Any, x: jax.Array, ctx: Context, cache: Any) -> tuple[Any, ...]:
        with listening(is_heard()) as scores:
            return *layer(x, ctx, cache), scores

    for i, layer in enumerate(layers):
        # Nothing learns through a cache.
        covered = (
            call
            if caches is not None
            else checkpointed(call, how, first + i, scanned=passed is not None)
        )
        number = first + i if passed is None else passed + (first + i)
        past = None if caches is None else caches[i]
        x, cache, scores = covered(layer, x, ctx.of_layer(number), past)
        tell(*scores)
        new.append(cache)
        if collect:
            states.append(x)
    return x, None if caches is None else new, states

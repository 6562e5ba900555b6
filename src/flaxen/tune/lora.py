"""New adapters on a model: which projections, what ranks, how they start."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from flaxen.core.checks import at_least, positive
from flaxen.core.errors import ConfigError
from flaxen.core.tree import paths
from flaxen.layers.linear import Embedding, Linear
from flaxen.models.fold import in_body, plain_paths
from flaxen.tune.leaf import DEFAULT, DoRA, LowRank, Replaced, links, root, row_norms, scale_of
from flaxen.tune.several import adapter_names, adapters, merge, trainable_paths
from flaxen.tune.start import INITS, started
from flaxen.tune.targets import (
    PROJECTIONS,
    check_layers,
    check_patterns,
    layer_of,
    matching,
    pattern_value,
    saved_modules,
)

__all__ = ["PROJECTIONS", "LowRank", "adapters", "add_lora", "merge", "scale_of", "trainable_paths"]


def add_lora(
    tree: Any,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: str | Sequence[str] | None = None,
    rank_stabilised: bool = False,
    seed: int = 0,
    name: str = DEFAULT,
    use_dora: bool = False,
    dropout: float = 0.0,
    init: str = "normal",
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    layers_to_transform: int | Sequence[int] | None = None,
    modules_to_save: Sequence[str] = (),
) -> Any:
    """The model with an adapter on each target; it computes the same until an adapter is trained.

    `targets` are names of projections, or a regular expression for the whole path of one
    (`.*self_attn.q_proj`), or "all-linear": all but heads and routers; by default all of
    `PROJECTIONS` that the model has. Experts of a mixture are no targets.
    `a` starts as `init` says (`flaxen.tune.start.INITS`), `b` is zero, and both are float32;
    "pissa" starts from the largest singular values instead. The weights are shared with the given
    model.
    `name` tells several adapters of a model apart. `use_dora` trains lengths of rows too. `dropout`
    is of the adapter's inputs. The patterns, {expression: rank or alpha}, are for projections whose
    path the expression ends, `layers_to_transform` are the only layers that get an adapter, and the
    heads and tables in `modules_to_save` are trained in full.

    Raises:
        ConfigError: a rank below 1 or beyond a weight's own, an alpha that is not above 0, a
            target or a pattern that matches nothing, or a model that has an adapter of this name
            already.
    """
    _check(tree, name, dropout, init)
    _check_numbers(rank, alpha, rank_pattern or {}, alpha_pattern or {})
    chosen, folded, names = matching(tree, targets), in_body(tree), plain_paths(tree)
    every = [name for path in chosen for name in names(path)]
    check_patterns([*(rank_pattern or ()), *(alpha_pattern or ())], every)
    layers = {layers_to_transform} if isinstance(layers_to_transform, int) else layers_to_transform
    check_layers(layers or (), every)

    def adapt(path: str, layer: Linear) -> Linear:
        if path not in chosen:
            return layer
        plain = names(path)
        ranks = [
            int(pattern_value(rank_pattern, each, rank))
            if layers is None or layer_of(each) in layers
            else 0
            for each in plain
        ]
        _check_rank(path, layer, folded(path), max(ranks))
        scales = {
            scale_of(r, pattern_value(alpha_pattern, each, alpha), rank_stabilised)
            for r, each in zip(ranks, plain, strict=True)
            if r
        }
        if not scales:
            return layer
        if len(scales) > 1 or (use_dora and 0 in ranks):
            raise ConfigError(
                f"{path} holds several layers, whose adapters would differ in their scale or "
                "lengths; load the model with scan_layers=False."
            )
        leaf = started(layer, plain, ranks, scales.pop(), init, seed, folded(path))
        leaf = [dataclasses.replace(x, name=name, dropout=dropout) for x in leaf]
        layer = _with(layer, leaf)
        return with_magnitude(layer) if use_dora else layer

    saved = saved_modules(tree, modules_to_save)
    adapted = map_linears(adapt, tree)
    if not saved and name not in adapter_names(adapted):
        raise ConfigError(
            f"No projection gets an adapter: targets {targets!r} in layers {layers_to_transform!r} "
            "are none."
        )
    return replaced(adapted, dict.fromkeys(saved), name)


def _check(tree: Any, name: str, dropout: float, init: str) -> None:
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout is {dropout}; expected 0 or more, and less than 1.")
    if not re.fullmatch(INITS, init):
        raise ConfigError(f"init is {init!r}; expected {INITS.replace('|', ', ')}.")
    check_new(tree, name)


def _check_numbers(
    rank: int, alpha: float, ranks: Mapping[str, int], alphas: Mapping[str, float]
) -> None:
    at_least("rank", rank, 1)
    positive("alpha", alpha)
    for pattern, value in ranks.items():
        at_least(f"rank_pattern[{pattern!r}]", value, 1)
    for pattern, value in alphas.items():
        positive(f"alpha_pattern[{pattern!r}]", value)


def _check_rank(path: str, layer: Linear, stacked: bool, rank: int) -> None:
    """An adapter of more rows than its weight has on either side is larger than the weight."""
    shape, split = layer.weight.shape, len(layer.weight.shape) - layer.contract
    outs, ins = math.prod(shape[int(stacked) : split]), math.prod(shape[split:])
    if rank > max(outs, ins):
        raise ConfigError(
            f"The adapter of {path} would have rank {rank}, but its weight is {outs} x {ins}; "
            f"expected at most {max(outs, ins)}, and usual are 4 to 256."
        )


def check_new(tree: Any, name: str) -> None:
    """
    Raises:
        ConfigError: the model has an adapter of this name.
    """
    if name in adapter_names(tree):
        raise ConfigError(
            f"This model has an adapter {name!r} already; merge them before adding others, or give "
            "this one another name=."
        )


def map_linears(change: Callable[[str, Linear], Linear], tree: Any) -> Any:
    """`tree` with `change(path, projection)` in place of every projection."""
    name = partial(jax.tree_util.keystr, simple=True, separator=".")
    is_linear = lambda x: isinstance(x, Linear)
    return jax.tree.map_with_path(
        lambda path, x: change(name(path), x) if is_linear(x) else x, tree, is_leaf=is_linear
    )


def with_adapter(layer: Linear, a: np.ndarray, b: np.ndarray, scale: float, **more: Any) -> Linear:
    """The projection with this adapter, which is cut along the same mesh axes as the weight."""
    return _with(layer, [LowRank(weight=None, a=a, b=b, scale=scale, **more)])


def _with(layer: Linear, leaves: Sequence[LowRank]) -> Linear:
    weight = layer.weight
    sharding = getattr(weight, "sharding", None)
    for leaf in leaves:
        leaf = dataclasses.replace(leaf, weight=weight)
        where = leaf.shardings(sharding) if isinstance(sharding, NamedSharding) else None
        a, b = (
            jnp.asarray(x) if where is None else jax.device_put(x, getattr(where, side))
            for side, x in (("a", leaf.a), ("b", leaf.b))
        )
        weight = dataclasses.replace(leaf, a=a, b=b)
    return dataclasses.replace(layer, weight=weight)


def with_magnitude(layer: Linear, magnitude: Any = None) -> Linear:
    """The projection with its last adapter as one of DoRA's; lengths are those of the rows as they
    are unless given.
    """
    leaf = layer.weight
    if magnitude is None:
        magnitude = norms(layer)
    fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    dora = DoRA(**fields, magnitude=magnitude)
    where = leaf.sharding
    if isinstance(where, NamedSharding):
        magnitude = jax.device_put(magnitude, dora.shardings(where).magnitude)
    return dataclasses.replace(
        layer, weight=dataclasses.replace(dora, magnitude=jnp.asarray(magnitude))
    )


def norms(layer: Linear) -> jax.Array:
    """The lengths of the rows of W + scale * b a, b being the last adapter's and W the base."""
    leaf = layer.weight
    alone = dataclasses.replace(leaf, weight=root(leaf), active=True)
    below = [link for link in links(leaf)[:-1] if link.name == leaf.name]
    for link in below:
        alone = dataclasses.replace(alone, weight=dataclasses.replace(link, weight=root(leaf)))
    return _norms(alone, layer.contract)


@partial(jax.jit, static_argnums=1)
def _norms(leaf: LowRank, contract: int) -> jax.Array:
    one = lambda leaf: row_norms(leaf, contract)
    return (jax.vmap(one) if leaf.stacked else one)(leaf)


def replaced(tree: Any, values: Mapping[str, Any], name: str) -> Any:
    """The model with these weights, by path, trained in full: a value of None starts as the weight
    is.
    """
    if not values:
        return tree
    is_part = lambda x: isinstance(x, Linear | Embedding)
    dotted = partial(jax.tree_util.keystr, simple=True, separator=".")

    def change(path: Any, part: Any) -> Any:
        if not is_part(part) or dotted(path) not in values:
            return part
        value, old = values[dotted(path)], root(part.weight)
        value = jnp.array(old, copy=True) if value is None else jnp.asarray(value, old.dtype)
        if isinstance(getattr(old, "sharding", None), NamedSharding):
            value = jax.device_put(value, old.sharding)
        return dataclasses.replace(
            part, weight=Replaced(weight=part.weight, value=value, name=name)
        )

    return jax.tree.map_with_path(change, tree, is_leaf=is_part)


def has_part(tree: Any, path: str) -> bool:
    """Whether there is a projection or a table at this path."""
    return isinstance(
        paths(tree, lambda x: isinstance(x, Linear | Embedding)).get(path), Linear | Embedding
    )

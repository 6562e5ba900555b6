"""The adapters of a model: which there are, which are active, what is trained, merging."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.errors import ConfigError, did_you_mean
from flaxen.core.tree import paths
from flaxen.tune.leaf import Adapter, DoRA, LowRank, chained, is_adapter, links, root


def adapters(tree: Any) -> dict[str, Any]:
    """Every weight that has adapters, by path: the last one put on."""
    found = paths(tree, is_leaf=is_adapter)
    return {path: leaf for path, leaf in found.items() if is_adapter(leaf)}


def adapter_names(tree: Any) -> list[str]:
    """The names of a model's adapters, in the order in which they were put on."""
    every = (link for leaf in adapters(tree).values() for link in links(leaf))
    return list(dict.fromkeys(link.name for link in every))


def trainable_paths(tree: Any, names: str | Sequence[str] | None = None) -> set[str]:
    """The leaves that training moves: those of the active adapters, or of these alone."""
    wanted = None if names is None else set(checked(tree, names))
    out = set()
    for path, leaf in adapters(tree).items():
        while isinstance(leaf, Adapter):
            frozen = isinstance(leaf, LowRank) and leaf.frozen
            if leaf.active and not frozen and (wanted is None or leaf.name in wanted):
                out |= {f"{path}.{field}" for field in leaf.trains}
            path, leaf = f"{path}.weight", leaf.weight
    return out


def with_dropout(tree: Any, key: jax.Array | None) -> Any:
    """The model with a key for each adapter that drops some of its inputs, for one step of
    training; without any if `key` is None.
    """

    def keyed(path: str, leaf: Any) -> Any:
        def one(i: int, link: Adapter) -> Adapter:
            if not isinstance(link, LowRank) or not link.dropout:
                return link
            mine = None
            if key is not None:
                mine = jax.random.fold_in(key, (zlib.crc32(path.encode()) + i) % 2**32)
                mine = jax.random.split(mine, link.a.shape[0]) if link.stacked else mine
            return dataclasses.replace(link, key=mine)

        return chained(root(leaf), (one(i, link) for i, link in enumerate(links(leaf))))

    return map_adapted(keyed, tree)


def set_adapters(
    tree: Any, names: str | Sequence[str], weights: float | Sequence[float] | None = None
) -> Any:
    """The model with these adapters active and all others not; with `weights`, the sum of the
    active ones so weighted. No names: the base model.

    Other weights of the same adapters compile nothing anew.

    Raises:
        ConfigError: a name that the model does not have, or another number of weights.
    """
    wanted = checked(tree, names)
    given = [weights] * len(wanted) if isinstance(weights, int | float) else weights
    if given is not None and len(given) != len(wanted):
        raise ConfigError(f"{len(given)} weights were given for {len(wanted)} adapters.")
    shares = dict.fromkeys(wanted) if given is None else dict(zip(wanted, given, strict=True))

    def one(link: Adapter) -> Adapter:
        link = dataclasses.replace(link, active=link.name in shares)
        share = shares.get(link.name)
        if not isinstance(link, LowRank):
            return link
        if share is not None:
            share = jnp.full(link.a.shape[: link.stacked], share, jnp.float32)
        return dataclasses.replace(link, share=share)

    return map_adapted(lambda _, leaf: chained(root(leaf), map(one, links(leaf))), tree)


def without_adapters(tree: Any, names: str | Sequence[str] | None = None) -> Any:
    """The model without these adapters (None: without any); the weights are those of the base.

    Raises:
        ConfigError: a name that the model does not have.
    """
    gone = set(adapter_names(tree) if names is None else checked(tree, names))
    keep = lambda leaf: [link for link in links(leaf) if link.name not in gone]
    return map_adapted(lambda _, leaf: chained(root(leaf), keep(leaf)), tree)


def merge(tree: Any, names: str | Sequence[str] | None = None) -> Any:
    """The model with adapters worked into its weights: W + scale * b @ a in float32, cast once to
    the weight's dtype; a packed W becomes a plain weight too.

    names: those that are merged, as if they were active; others stay on top. None makes a plain
    model that computes what this one does: active adapters are merged, others dropped.

    Raises:
        ConfigError: when there is no such adapter, so that nothing is merged twice unnoticed; or
            some are merged below or beside one of DoRA's, which depends on the weight below.
    """
    if names is None and not adapters(tree):
        raise ConfigError("This model has no adapters to merge; were they merged already?")
    wanted = None if names is None else set(checked(tree, names))

    def one(path: str, leaf: Any) -> Any:
        if wanted is None:
            return _merged(leaf)
        inside = [link for link in links(leaf) if link.name in wanted]
        above = [link for link in links(leaf) if link.name not in wanted]
        if not inside:
            return leaf
        if above and any(isinstance(link, DoRA) for link in links(leaf)):
            raise ConfigError(
                f"{path} has the adapters {', '.join(x.name for x in links(leaf))}, one of them "
                "DoRA's, which depends on the others; merge all of them, or remove some first."
            )
        active = (dataclasses.replace(link, active=True) for link in inside)
        return chained(_merged(chained(root(leaf), active)), above)

    return map_adapted(one, tree)


@jax.jit
def _merged(leaf: Any) -> jax.Array:
    stacked = next((link.stacked for link in links(leaf) if isinstance(link, LowRank)), 0)
    plain = lambda leaf: leaf.plain()
    return (jax.vmap(plain) if stacked else plain)(leaf).astype(leaf.dtype)


def checked(tree: Any, names: str | Iterable[str]) -> list[str]:
    """These names as a list.

    Raises:
        ConfigError: one is no adapter of the model.
    """
    names, there = [names] if isinstance(names, str) else list(names), adapter_names(tree)
    for name in names:
        if name not in there:
            has = f"it has {', '.join(map(repr, there))}" if there else "it has none"
            near = did_you_mean(str(name), there, most=0) or " Was it merged already?"
            raise ConfigError(f"This model has no adapter {name!r}; {has}.{near}")
    return names


def map_adapted(change: Callable[[str, Any], Any], tree: Any) -> Any:
    """`tree` with `change(path, leaf)` in place of each weight with adapters."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return jax.tree.map_with_path(
        lambda path, x: change(name(path), x) if is_adapter(x) else x, tree, is_leaf=is_adapter
    )

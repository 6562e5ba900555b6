"""Another adapter for each row of a batch: one model serves all of them in one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxen.core.dot import dot, rows
from flaxen.core.errors import ConfigError, InputError
from flaxen.core.tree import module
from flaxen.tune.leaf import DoRA, LowRank, links, placed, root
from flaxen.tune.several import adapter_names, checked, map_adapted


@module
class RowAdapters:
    """A weight (out..., in...) and the adapters of a batch's rows: a (n, rank, in...), b (n,
    out..., rank) with the scale in it, of which row i takes number `which[i]`. In a folded model
    all have a `layers` axis in front. To merge, go back to the model that this was made of.
    """

    weight: Any
    a: Any
    b: Any
    which: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def ndim(self) -> int:
        return len(self.weight.shape)

    @property
    def dtype(self) -> Any:
        return self.weight.dtype

    def dot(self, x: jax.Array, contract: int) -> jax.Array:
        """As `core.dot.dot`; x (B, ..., in...), a row of the batch at each index of its first
        axis.
        """
        if len(x) != len(self.which) or x.ndim == contract:
            raise InputError(
                f"Adapters were chosen for {len(self.which)} rows, and a projection sees "
                f"{len(x)}. Choose one for each row of the batch; parts that see tokens apart "
                "from their rows cannot have any."
            )
        a, b = (jnp.take(side, self.which, 0) for side in (self.a, self.b))
        low = jax.vmap(lambda x, a, b: dot(dot(x, a, contract), b))(x, a, b)
        return dot(x, self.weight, contract) + low

    def rows(self, ids: jax.Array) -> jax.Array:
        """As `core.dot.rows`; ids (B, ...)."""
        a, b = (jnp.take(side, self.which, 0) for side in (self.a, self.b))
        low = jax.vmap(lambda ids, a, b: rows(b, ids) @ a)(ids, a, b)
        return rows(self.weight, ids) + low.astype(self.dtype)

    def shardings(self, where: Any) -> RowAdapters:
        """The leaf with the place of each array, for a weight that lies at `where`."""
        if not isinstance(where, NamedSharding):
            return dataclasses.replace(
                self, weight=placed(self.weight, where), a=where, b=where, which=where
            )
        spec = (*where.spec, *[None] * self.ndim)[: self.ndim]
        stacked = self.which.ndim - 1
        ins = self.a.ndim - stacked - 2
        outs = spec[stacked : self.ndim - ins]
        put = lambda *spec: NamedSharding(where.mesh, P(*spec))
        return dataclasses.replace(
            self,
            weight=placed(self.weight, where),
            a=put(*spec[:stacked], None, None, *spec[self.ndim - ins :]),
            b=put(*spec[:stacked], None, *outs, None),
            which=put(*spec[:stacked], None),
        )


def for_rows(tree: Any, names: Sequence[str | None]) -> Any:
    """The model for batches of `len(names)` rows, row i with the adapter `names[i]` alone, or with
    none. Other names for as many rows, of the same model, compile nothing anew.

    Raises:
        ConfigError: a name that the model does not have, no rows, or adapters that are not low-rank
            sums.
    """
    there = adapter_names(tree)
    checked(tree, [name for name in names if name is not None])
    if not names or not there:
        raise ConfigError(f"{len(names)} rows were given, and the model's adapters are {there}.")
    # The last is no adapter: zeros.
    which = np.array([len(there) if name is None else there.index(name) for name in names])

    def stacked(path: str, leaf: Any) -> RowAdapters:
        chain = links(leaf)
        if any(isinstance(x, DoRA) or not isinstance(x, LowRank) for x in chain):
            raise ConfigError(
                f"{path} has an adapter that is no low-rank sum (DoRA, or a weight in full), which "
                "rows of a batch cannot choose. Merge it into a model of its own."
            )
        return _stack(root(leaf), chain, there, which)

    return map_adapted(stacked, tree)


def _stack(weight: Any, chain: Sequence[Any], there: Sequence[str], which: np.ndarray) -> Any:
    first, at = chain[0], chain[0].stacked
    rank = max(sum(x.rank for x in chain if x.name == name) for name in there)
    of = lambda name: [x for x in chain if x.name == name]
    a = [_padded([x.a for x in of(n)], rank, at, first.a.shape) for n in (*there, None)]
    b = [_padded([x.b * x.scale for x in of(n)], rank, -1, first.b.shape) for n in (*there, None)]
    chosen = jnp.broadcast_to(jnp.asarray(which), (*first.a.shape[:at], len(which)))
    return RowAdapters(weight=weight, a=jnp.stack(a, at), b=jnp.stack(b, at), which=chosen)


def _padded(parts: Sequence[jax.Array], rank: int, axis: int, like: tuple[int, ...]) -> jax.Array:
    """The parts one after the other along the axis of ranks, and zeros up to `rank`."""
    have = sum(part.shape[axis] for part in parts)
    rest = list(like)
    rest[axis] = rank - have
    return jnp.concatenate([*parts, jnp.zeros(rest, jnp.float32)], axis)

"""Adapters as leaves: each stands where a weight stands and adds to what is below it.

Several adapters of one weight are such leaves one inside the other, the oldest innermost.

Source: LoRA, https://arxiv.org/abs/2106.09685; rank-stabilised scale,
https://arxiv.org/abs/2312.03732; DoRA, https://arxiv.org/abs/2402.09353, computed as PEFT does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flaxen.core.dot import dot, is_leaf_type, rows
from flaxen.core.tree import module, static
from flaxen.layers.dropout import dropout
from flaxen.quantize import QuantizedWeight

DEFAULT = "default"
"""The name of an adapter that was given none."""


@module
class Adapter:
    """`weight` is what is adapted: an array, a packed weight or another adapter. One that is not
    `active` changes nothing.
    """

    weight: Any
    name: static[str] = DEFAULT
    active: static[bool] = True
    trains: ClassVar[tuple[str, ...]] = ()
    """The fields that are trained."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def ndim(self) -> int:
        return len(self.weight.shape)

    @property
    def dtype(self) -> Any:
        return self.weight.dtype

    @property
    def sharding(self) -> Any:
        return getattr(self.weight, "sharding", None)

    def plain(self) -> jax.Array:
        """The weight (out..., in...) with what its adapters make of it, in float32; without a
        `layers` axis.
        """
        raise NotImplementedError


@module
class LowRank(Adapter):
    """A weight (out..., in...) and its adapter: a (rank, in...), b (out..., rank).

    In a folded model all three have a `layers` axis in front, and so have `share`, the weight of
    this adapter among others (None: 1), and `key`, which is there only while training: it drops
    inputs of the adapter at the rate `dropout`. A `frozen` one is not trained.
    """

    a: Any
    b: Any
    scale: static[float]
    share: Any = None
    key: Any = None
    dropout: static[float] = 0.0
    frozen: static[bool] = False
    trains: ClassVar[tuple[str, ...]] = ("a", "b")

    @property
    def stacked(self) -> int:
        """1 if there is a `layers` axis, else 0."""
        return self.a.ndim + self.b.ndim - 2 - self.ndim

    @property
    def rank(self) -> int:
        return self.a.shape[self.stacked]

    @property
    def factor(self) -> Any:
        return self.scale if self.share is None else self.scale * self.share

    def dropped(self, x: jax.Array) -> jax.Array:
        """The adapter's input."""
        return dropout(x, self.dropout, self.key)

    def low(self, x: jax.Array, contract: int) -> jax.Array:
        """scale * b a x."""
        low = dot(dot(x, self.a, contract), self.b)
        return jnp.asarray(self.factor, low.dtype) * low

    def dot(self, x: jax.Array, contract: int) -> jax.Array:
        """As `core.dot.dot`, for the sum of the weight and its adapter."""
        y = dot(x, self.weight, contract)
        return y + self.low(self.dropped(x), contract) if self.active else y

    def rows(self, ids: jax.Array) -> jax.Array:
        """As `core.dot.rows`, for the sum of the weight and its adapter."""
        y = rows(self.weight, ids)
        if not self.active:
            return y
        return y + (self.factor * (rows(self.b, ids) @ self.a)).astype(self.dtype)

    def plain(self) -> jax.Array:
        w = plain(self.weight)
        return w + self.change() if self.active else w

    def change(self) -> jax.Array:
        """scale * b a, (out..., in...) in float32."""
        a, b = self.a.astype(jnp.float32), self.b.astype(jnp.float32)
        return self.factor * jax.lax.dot_general(
            b, a, (((b.ndim - 1,), (0,)), ((), ())), precision="highest"
        )

    def shardings(self, where: Any) -> Any:
        """The leaf with the place of each array, for a weight that lies at `where`."""
        spec, split = (None,) * self.ndim, self.b.ndim - 1
        if isinstance(where, NamedSharding):
            spec = (*where.spec, *[None] * self.ndim)[: self.ndim]
        layers = spec[: self.stacked]
        places = {"a": (*layers, None, *spec[split:]), "b": (*spec[:split], None)}
        return self._placed(where, places | {"share": layers, "key": layers})

    def _placed(self, where: Any, places: dict[str, tuple[Any, ...]]) -> Any:
        named = isinstance(where, NamedSharding)
        put = {
            field: NamedSharding(where.mesh, P(*spec)) if named else where
            for field, spec in places.items()
            if getattr(self, field) is not None
        }
        return dataclasses.replace(self, weight=placed(self.weight, where), **put)


@module
class DoRA(LowRank):
    """A low-rank adapter whose sum with the weight is scaled for each output to the length
    `magnitude` (out...): magnitude * V / |V| with V = W + scale * b a.

    |V| is of the weight without other adapters, and a constant to gradients.
    """

    magnitude: Any
    trains: ClassVar[tuple[str, ...]] = ("a", "b", "magnitude")

    def dot(self, x: jax.Array, contract: int) -> jax.Array:
        y = dot(x, self.weight, contract)
        if not self.active:
            return y
        ratio, dropped = self.ratio().astype(y.dtype), self.dropped(x)
        if dropped is x:
            return ratio * (y + self.low(x, contract))
        base = dot(dropped, root(self.weight), contract)
        return y + (ratio - 1) * base + ratio * self.low(dropped, contract)

    def rows(self, ids: jax.Array) -> jax.Array:
        y = LowRank.rows(self, ids)
        return (self.ratio()[ids][..., None] * y).astype(y.dtype) if self.active else y

    def plain(self) -> jax.Array:
        v = LowRank.plain(self)
        if not self.active:
            return v
        ratio = self.ratio()
        return ratio.reshape(*ratio.shape, *[1] * (v.ndim - ratio.ndim)) * v

    def ratio(self) -> jax.Array:
        """magnitude / |V|, (out...) in float32."""
        return self.magnitude.astype(jnp.float32) / self.norm()

    def norm(self) -> jax.Array:
        """|V| for each output, from products of its parts: V itself is never there."""
        a, b, factor = jax.lax.stop_gradient((self.a, self.b, self.factor))
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        base, ins = jax.lax.stop_gradient(root(self.weight)), self.a.ndim - 1
        with jax.default_matmul_precision("highest"):
            flat = a.reshape(len(a), -1)
            # (rank, out...) -> (out..., rank)
            cross = 2 * jnp.moveaxis(dot(a, base, ins), 0, -1) + factor * (b @ (flat @ flat.T))
        square = row_norms(base, ins) ** 2 + factor * jnp.sum(b * cross, -1)
        return jnp.sqrt(jnp.maximum(square, 0))

    def shardings(self, where: Any) -> Any:
        leaf = LowRank.shardings(self, where)
        if not isinstance(where, NamedSharding):
            return dataclasses.replace(leaf, magnitude=where)
        spec = (*where.spec, *[None] * self.ndim)[: self.magnitude.ndim]
        return dataclasses.replace(leaf, magnitude=NamedSharding(where.mesh, P(*spec)))


@module
class Replaced(Adapter):
    """A weight that is trained in full: `value` takes the place of `weight`, which stays."""

    value: Any
    trains: ClassVar[tuple[str, ...]] = ("value",)

    @property
    def now(self) -> Any:
        return self.value if self.active else self.weight

    def dot(self, x: jax.Array, contract: int) -> jax.Array:
        return dot(x, self.now, contract)

    def rows(self, ids: jax.Array) -> jax.Array:
        return rows(self.now, ids).astype(self.dtype)

    def plain(self) -> jax.Array:
        return plain(self.now)

    def shardings(self, where: Any) -> Replaced:
        return dataclasses.replace(self, weight=placed(self.weight, where), value=where)


def plain(weight: Any) -> jax.Array:
    """A weight of any kind, (out..., in...) in float32."""
    if isinstance(weight, Adapter):
        return weight.plain()
    values = weight.values() if isinstance(weight, QuantizedWeight) else jnp.asarray(weight)
    return values.astype(jnp.float32)


def row_norms(weight: Any, contract: int) -> jax.Array:
    """The length of a weight for each output, (out...) in float32, over `contract` input axes."""
    values = plain(weight)
    return jnp.sqrt(jnp.sum(values * values, tuple(range(values.ndim - contract, values.ndim))))


def placed(weight: Any, where: Any) -> Any:
    return weight.shardings(where) if is_leaf_type(weight) else where


def is_adapter(x: Any) -> bool:
    return isinstance(x, Adapter)


def links(leaf: Any) -> list[Adapter]:
    """The adapters of a weight, the innermost first."""
    return list(_outwards(leaf))


def _outwards(leaf: Any) -> Iterator[Adapter]:
    if isinstance(leaf, Adapter):
        yield from _outwards(leaf.weight)
        yield leaf


def root(leaf: Any) -> Any:
    """The weight without its adapters."""
    return root(leaf.weight) if isinstance(leaf, Adapter) else leaf


def chained(weight: Any, adapters: Iterable[Adapter]) -> Any:
    """The weight with these adapters, the innermost first."""
    for adapter in adapters:
        weight = dataclasses.replace(adapter, weight=weight)
    return weight


def scale_of(rank: int, alpha: float, rank_stabilised: bool = False) -> float:
    """alpha / rank, or alpha / sqrt(rank)."""
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)

"""A leaf that stands where a weight stands and holds it as its checkpoint stores it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flaxen.convert.schemes.base import Scheme
from flaxen.core.dot import dense
from flaxen.core.tree import module, static
from flaxen.shard.specs import ways


@module
class QuantizedWeight:
    """A matrix weight (out..., in...) as codes, scales and what else its scheme stores.

    parts: the stored arrays by the last piece of their names, untouched, so that saving gives them
    back; in a folded model each has a `layers` axis in front. inner: the weight's shape without
    that axis, whose first `outs` axes are outputs. dtype: what its values are rounded to.

    Products work the values out inside the compiled step, `pieces` runs of outputs one after the
    other, each of which lives no longer than its product; nothing outside holds them.
    """

    parts: Any
    scheme: static[Scheme]
    inner: static[tuple[int, ...]]
    outs: static[int]
    dtype: static[np.dtype]
    pieces: static[int] = 1

    @property
    def stacked(self) -> int:
        """1 if there is a `layers` axis, else 0."""
        role, axes = next(iter(self.scheme.axes.items()))
        return len(self.parts[role].shape) - len(axes)

    @property
    def shape(self) -> tuple[int, ...]:
        role = next(iter(self.scheme.axes))
        return (*self.parts[role].shape[: self.stacked], *self.inner)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def sharding(self) -> Any:
        """How a mesh cuts the weight, as its codes tell; None if no mesh holds them."""
        role, axes = next(iter(self.scheme.axes.items()))
        held = getattr(self.parts[role], "sharding", None)
        if not isinstance(held, NamedSharding):
            return None
        spec = (*held.spec, *[None] * len(self.parts[role].shape))[: self.stacked + len(axes)]
        cuts = dict(zip(axes, spec[self.stacked :], strict=True))
        outs = (cuts["out"], *[None] * (self.outs - 1))
        ins = (cuts["in"], *[None] * (len(self.inner) - self.outs - 1))
        return NamedSharding(held.mesh, PartitionSpec(*spec[: self.stacked], *outs, *ins))

    def shardings(self, where: Any) -> QuantizedWeight:
        """The leaf with places for parts, for a weight that lies at `where`: each is cut as the
        weight is, along those of its axes that divide.
        """
        if not isinstance(where, NamedSharding):
            return dataclasses.replace(self, parts=dict.fromkeys(self.parts, where))
        spec = (*where.spec, *[None] * self.ndim)[: self.ndim]
        layers, inner = spec[: self.stacked], spec[self.stacked :]
        cuts = {"out": _flat_cut(inner[: self.outs]), "in": _flat_cut(inner[self.outs :])}

        def place(role: str, shape: tuple[int, ...]) -> NamedSharding:
            axes = self.scheme.axes.get(role, ())
            if len(shape) != len(layers) + len(axes):
                return NamedSharding(where.mesh, PartitionSpec())
            wanted = [*layers, *(cuts[axis] for axis in axes)]
            fitting = (
                cut if n % ways(where.mesh, cut) == 0 else None
                for n, cut in zip(shape, wanted, strict=True)
            )
            return NamedSharding(where.mesh, PartitionSpec(*fitting))

        places = {role: place(role, part.shape) for role, part in self.parts.items()}
        return dataclasses.replace(self, parts=places)

    def values(self) -> jax.Array:
        """The plain weight (out..., in...): what loading without keeping gives."""
        values = self.scheme.values(self.parts, jnp)
        return values.astype(self.dtype).reshape(self.inner)

    def dot(self, x: jax.Array, contract: int) -> jax.Array:
        """As `core.dot.dot`, for the values."""
        if self.pieces == 1:
            return dense(x, self.values(), contract)
        batch, width = x.shape[: x.ndim - contract], math.prod(self.inner[self.outs :])
        x = x.reshape(*batch, width)
        y = jax.lax.map(lambda i: dense(x, self._piece(i, width), 1), jnp.arange(self.pieces))
        return jnp.moveaxis(y, 0, -2).reshape(*batch, *self.inner[: self.outs])

    def _piece(self, i: jax.Array, width: int) -> jax.Array:
        """One run of outputs."""
        parts = dict(self.parts)
        for role, axes in self.scheme.axes.items():
            if "out" in axes and parts[role].ndim == len(axes):
                axis = axes.index("out")
                size = parts[role].shape[axis] // self.pieces
                parts[role] = _run(parts[role], i * size, size, axis)
        values = self.scheme.values(parts, jnp)
        return values.astype(self.dtype).reshape(-1, width)

    def rows(self, ids: jax.Array) -> jax.Array:
        """As `core.dot.rows`, for the values."""
        return self.values()[ids]


def _run(part: jax.Array, start: jax.Array, size: int, axis: int) -> jax.Array:
    # As bytes: XLA on CPU would first widen all of a float8 array that is cut inside a loop.
    raw = part.view(jnp.uint8) if part.dtype.itemsize == 1 else part
    return jax.lax.dynamic_slice_in_dim(raw, start, size, axis).view(part.dtype)


def _flat_cut(spec: Sequence[Any]) -> Any:
    """How axes that lie flat in one are cut: as the outermost is, if the others are whole."""
    return spec[0] if not any(spec[1:]) else None

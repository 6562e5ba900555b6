"""A leaf that stands where a weight stands and holds it as its checkpoint stores it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.convert.schemes.base import Scheme
from flaxen.core.dot import dense
from flaxen.core.tree import module, static


@module
class QuantizedWeight:
    """A matrix weight (out..., in...) as codes, scales and what else its scheme stores.

    parts: the stored arrays by the last piece of their names, untouched, so that saving gives them
    back; in a folded model each has a `layers` axis in front. inner: the weight's shape without
    that axis, whose first `outs` axes are outputs. dtype: what its values are rounded to.

    Products work the values out inside the compiled step, where they live no longer than the
    product; nothing outside holds them.
    """

    parts: Any
    scheme: static[Scheme]
    inner: static[tuple[int, ...]]
    outs: static[int]
    dtype: static[np.dtype]

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

    def values(self) -> jax.Array:
        """The plain weight (out..., in...): what loading without keeping gives."""
        values = self.scheme.values(self.parts, jnp)
        return values.astype(self.dtype).reshape(self.inner)

    def dot(self, x: jax.Array, contract: int) -> jax.Array:
        """As `core.dot.dot`, for the values."""
        return dense(x, self.values(), contract)

    def rows(self, ids: jax.Array) -> jax.Array:
        """As `core.dot.rows`, for the values."""
        return self.values()[ids]

"""A leaf that stands where a weight stands and holds integers of 8 or 4 bits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.dot import dense
from flaxen.core.platform import platform
from flaxen.core.tree import module
from flaxen.quantize.leaf import QuantizedWeight
from flaxen.quantize.rounding import Rounding, nibbles

PIECE = 1 << 20
"""Bytes of float32 values that a product on CPU works out at a time: they stay in its cache."""


@module
class RoundedWeight(QuantizedWeight):
    """A weight (..., out..., in...) rounded as its `scheme`, a `Rounding`, says.

    Products are those of the values code * scale in float32 on CPU, in the dtype of `x` elsewhere;
    a scale for all inputs is multiplied after the product. On CPU one run of outputs after the
    other is worked out, as XLA would else write out the whole matrix first. Leading axes are
    `layers`, and `experts` of a mixture. Frozen: a gradient goes to `x` alone.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        flat = self.flat_shape
        # Where a mesh has cut experts, a matrix is smaller here than as a whole.
        return flat if len(self.inner) == 2 else (*flat[:-2], *self.inner)

    @property
    def flat_shape(self) -> tuple[int, ...]:
        """(..., out, in)"""
        codes = self.parts["codes"].shape
        return (*codes[:-2], codes[-2] * self.rounding.outputs, codes[-1])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def rounding(self) -> Rounding:
        assert isinstance(self.scheme, Rounding)
        return self.scheme

    def __getitem__(self, i: Any) -> RoundedWeight:
        """One layer, or one expert."""
        return dataclasses.replace(self, parts={k: part[i] for k, part in self.parts.items()})

    def values(self) -> jax.Array:
        """The plain weight (..., out..., in...)."""
        return self.scheme.values(self.parts, jnp).astype(self.dtype).reshape(self.shape)

    def dot(self, x: jax.Array, contract: int) -> jax.Array:
        """As `core.dot.dot`, for the values."""
        batch, width = x.shape[: x.ndim - contract], math.prod(self.inner[self.outs :])
        y = self._rows_times(x.reshape(-1, width))
        return y.astype(x.dtype).reshape(*batch, *self.inner[: self.outs])

    def _rows_times(self, x: jax.Array) -> jax.Array:
        """x (R, in) -> (R, out)."""
        if platform() == "cpu":
            x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        codes, scales = self.parts["codes"], jax.lax.stop_gradient(self.parts["scales"])
        count = self.pieces if platform() == "cpu" else 1
        if count == 1:
            return self._run(x, codes, scales)
        # Without the checkpoint a gradient would keep every piece's values.
        run = jax.checkpoint(lambda piece: self._run(x, *piece))
        y = jax.lax.map(run, tuple(a.reshape(count, -1, a.shape[-1]) for a in (codes, scales)))
        return jnp.moveaxis(y, 0, 1).reshape(len(x), -1)

    def _run(self, x: jax.Array, stored: jax.Array, scales: jax.Array) -> jax.Array:
        """Some outputs: x (R, in), stored (out / outputs, in), scales (out, groups) -> (R, out)."""
        if self.rounding.bits == 8:
            return _scaled(x, self.rounding.levels(stored, jnp), scales)
        # Apart, so that no two halves of a byte have to become neighbours in memory.
        pairs = scales.reshape(-1, 2, scales.shape[-1])
        halves = (self.rounding.levels(codes, jnp) for codes in nibbles(stored, jnp))
        each = [_scaled(x, codes, pairs[:, i]) for i, codes in enumerate(halves)]
        return jnp.stack(each, -1).reshape(len(x), -1)

    def rows(self, ids: jax.Array) -> jax.Array:
        """As `core.dot.rows`, for the values; only the rows that are asked for are worked out."""
        stored = self.parts["codes"][ids // self.rounding.outputs]
        if self.rounding.bits == 4:
            low, high = nibbles(stored, jnp)
            stored = jnp.where((ids % 2 == 0)[..., None], low, high)
        scales = self.parts["scales"][ids].astype(jnp.float32)
        groups = self.rounding.levels(stored, jnp).reshape(*scales.shape, -1)
        groups = groups.astype(jnp.float32) * scales[..., None]
        return groups.reshape(*ids.shape, -1).astype(self.dtype)


def _scaled(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """x (R, in) times codes (out, in) with scales (out, groups) -> (R, out), at least float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    scales = scales.astype(wide)
    if scales.shape[-1] == 1:
        return dense(x, codes, 1, wide) * scales[:, 0]
    groups = codes.reshape(*scales.shape, -1).astype(wide) * scales[..., None]
    return dense(x, groups.astype(x.dtype).reshape(codes.shape), 1, wide)


def rounded_weight(
    parts: Any,
    rounding: Rounding,
    inner: tuple[int, ...],
    outs: int,
    dtype: np.dtype,
    *,
    whole: bool,
) -> RoundedWeight:
    """The leaf. inner: the weight's shape without leading axes, `outs` axes of it outputs. whole:
    multiply in one piece, as is best where a mesh cuts the weight.
    """
    runs, width = math.prod(inner[:outs]) // rounding.outputs, math.prod(inner[outs:])
    pieces = 1 if whole else _pieces(runs, width * rounding.outputs * 4)
    return RoundedWeight(
        parts=parts, scheme=rounding, inner=inner, outs=outs, dtype=dtype, pieces=pieces
    )


def _pieces(runs: int, nbytes: int) -> int:
    """Into how many equal pieces so many runs of so many bytes go: each at most `PIECE`, unless
    that takes far too many.
    """
    least = -(-runs * nbytes // PIECE)
    fits = [n for n in range(1, min(runs, 8 * least) + 1) if runs % n == 0]
    return next((n for n in fits if n >= least), fits[-1])

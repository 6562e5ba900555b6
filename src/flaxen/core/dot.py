"""The one product of activations with a weight: every platform rule about it lives here.

A weight keeps the order of its file, `[out..., in...]`, and its trailing axes are contracted with
those of `x`.
A weight may be an array or a leaf type (quantised, low-rank) that brings its own `dot` and `rows`.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.platform import platform


@runtime_checkable
class WeightLeaf(Protocol):
    """What may stand where a weight array stands."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def dot(self, x: jax.Array, contract: int) -> jax.Array: ...

    def rows(self, ids: jax.Array) -> jax.Array: ...


def dot(x: jax.Array, weight: Any, contract: int = 1) -> jax.Array:
    """Contract the last `contract` axes of `x` with the last ones of `weight`.

    x: (batch..., in...), weight: (out..., in...) -> (batch..., out...), in the dtype of `x`.
    """
    if not isinstance(weight, jax.Array | np.ndarray):
        return weight.dot(x, contract)
    return dense(x, weight, contract)


def dense(x: jax.Array, weight: jax.Array, contract: int, out_dtype: Any = None) -> jax.Array:
    """`dot` for plain arrays; products of 16-bit floats accumulate in float32."""
    over = (
        tuple(range(x.ndim - contract, x.ndim)),
        tuple(range(weight.ndim - contract, weight.ndim)),
    )
    one_row = math.prod(x.shape[: x.ndim - contract]) == 1
    if one_row and weight.dtype != jnp.float32 and platform() == "cpu":
        # XLA's 16-bit matrix-vector product on CPU is many times slower than two rows at once.
        pair = jnp.concatenate([x, x], axis=0) if x.ndim > contract else jnp.stack([x, x])
        y = dense(pair, weight, contract, out_dtype)
        return y[:1] if x.ndim > contract else y[0]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jax.lax.dot_general(
        x, weight.astype(x.dtype), (over, ((), ())), preferred_element_type=wide
    )
    return y.astype(out_dtype or x.dtype)


def rows(weight: Any, ids: jax.Array) -> jax.Array:
    """Rows of an embedding table. ids: (...), weight: (vocab, embed) -> (..., embed)."""
    if not isinstance(weight, jax.Array | np.ndarray):
        return weight.rows(ids)
    return weight[ids]

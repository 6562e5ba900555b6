"""The products of the library: every platform rule about them lives here.

A weight keeps the order of its file, `[out..., in...]`, and its trailing axes are contracted with
those of `x`. It may be an array or a leaf type (quantised, low-rank) with its own `dot` and `rows`.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from flaxen.core.platform import platform

FEW_ROWS = 16
"""Below this many rows a product is bound by reading its weight, above by arithmetic."""


@runtime_checkable
class WeightLeaf(Protocol):
    """What may stand where a weight array stands.

    `shardings(where)` is the leaf with the place of each of its arrays, for a weight that lies at
    `where`.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def dot(self, x: jax.Array, contract: int) -> jax.Array: ...

    def rows(self, ids: jax.Array) -> jax.Array: ...

    def shardings(self, where: Any) -> Any: ...


def is_leaf_type(x: Any) -> bool:
    """Whether this stands for a weight and is not an array."""
    return isinstance(x, WeightLeaf) and not isinstance(x, jax.Array | np.ndarray)


def dot(x: jax.Array, weight: Any, contract: int = 1) -> jax.Array:
    """Contract the last `contract` axes of `x` with the last ones of `weight`.

    x: (batch..., in...), weight: (out..., in...) -> (batch..., out...), in the dtype of `x`.
    """
    if not isinstance(weight, jax.Array | np.ndarray):
        return weight.dot(x, contract)
    return dense(x, weight, contract)


def dense(x: jax.Array, weight: Any, contract: int, out_dtype: Any = None) -> jax.Array:
    """`dot` for plain arrays; products of 16-bit floats accumulate in float32."""
    out_dtype = out_dtype or x.dtype
    weight = jnp.asarray(weight, x.dtype)
    if weight.ndim > 2 or contract > 1:
        # As a table: XLA on CPU would first copy a weight of more axes into another order.
        batch, kept = x.shape[: x.ndim - contract], weight.shape[: weight.ndim - contract]
        width = math.prod(x.shape[x.ndim - contract :])
        y = dense(x.reshape(*batch, width), weight.reshape(-1, width), 1, out_dtype)
        return y.reshape(*batch, *kept)
    if x.ndim > 2 and platform() == "cpu":
        # The gradient of the weight contracts one axis faster than several.
        flat = dense(x.reshape(-1, x.shape[-1]), weight, 1, out_dtype)
        return flat.reshape(*x.shape[:-1], *flat.shape[1:])
    batch, kept = x.shape[: x.ndim - contract], weight.shape[: weight.ndim - contract]
    if math.prod(batch) == 1 and x.dtype.itemsize == 2 and platform() == "cpu":
        y = _one_row(x, weight, contract).reshape(*batch, *kept)
        return y.astype(out_dtype)
    if x.dtype == jnp.bfloat16 and platform() == "cpu" and arithmetic(x.dtype) == x.dtype:
        y: Any = _transposing(x, weight, contract)
        return y.astype(out_dtype)
    return product(x, weight, _last_axes(x, contract, len(kept))).astype(out_dtype)


def product(a: jax.Array, b: jax.Array, dims: Any) -> jax.Array:
    """`lax.dot_general` that accumulates, and returns, at least float32."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    (over, _), (batch, _) = dims
    rows = math.prod(a.shape) // math.prod(a.shape[i] for i in (*over, *batch)) if a.size else 0
    if rows >= FEW_ROWS:
        a, b = a.astype(arithmetic(a.dtype)), b.astype(arithmetic(b.dtype))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=wide)


def arithmetic(dtype: Any) -> Any:
    """The dtype in which large products of `dtype` are fastest here: never a less exact one."""
    if jnp.dtype(dtype).itemsize == 2 and platform() == "cpu" and not _cpu_multiplies_bfloat16():
        return jnp.dtype(jnp.float32)
    return jnp.dtype(dtype)


def rows(weight: Any, ids: jax.Array) -> jax.Array:
    """Rows of an embedding table. ids: (...), weight: (vocab, embed) -> (..., embed)."""
    if not isinstance(weight, jax.Array | np.ndarray):
        return weight.rows(ids)
    return jnp.asarray(weight)[ids]


def _one_row(x: jax.Array, weight: jax.Array, contract: int) -> jax.Array:
    # XLA's 16-bit matrix-vector product on CPU first writes the weight out in float32; two columns
    # reach a kernel that streams the weight as it is.
    row = x.reshape(x.shape[x.ndim - contract :])
    return product(weight, jnp.stack([row, row]), _last_axes(weight, contract, 1))[..., 0]


def _last_axes(a: jax.Array, contract: int, batch: int) -> Any:
    """Dimension numbers: the last axes of `a` with all but the first `batch` of the other."""
    over = tuple(range(a.ndim - contract, a.ndim)), tuple(range(batch, batch + contract))
    return over, ((), ())


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _transposing(x: jax.Array, weight: jax.Array, contract: int) -> jax.Array:
    """A product whose gradients are products over last axes too, of operands transposed in memory.

    XLA on CPU contracts leading axes of bfloat16 at a third of that speed.
    """
    return product(x, weight, _last_axes(x, contract, weight.ndim - contract))


def _transposing_fwd(x: jax.Array, weight: jax.Array, contract: int) -> Any:
    return _transposing(x, weight, contract), (x, weight)


def _transposing_bwd(contract: int, kept: Any, grad: jax.Array) -> Any:
    x, weight = kept
    k = math.prod(x.shape[x.ndim - contract :])
    x2, w2 = x.reshape(-1, k), weight.reshape(-1, k)
    g2 = grad.reshape(x2.shape[0], w2.shape[0]).astype(x.dtype)
    dx = product(g2, _in_memory(w2.T), (((1,), (1,)), ((), ())))
    dw = product(_in_memory(g2.T), _in_memory(x2.T), (((1,), (1,)), ((), ())))
    return dx.reshape(x.shape).astype(x.dtype), dw.reshape(weight.shape).astype(weight.dtype)


_transposing.defvjp(_transposing_fwd, _transposing_bwd)


def _in_memory(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


@functools.cache
def _cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has bfloat16 arithmetic (AVX-512 BF16 or AMX); then float32 is slower."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags

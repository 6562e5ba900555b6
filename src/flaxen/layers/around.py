"""Small parts without weights of their own, for the slots around projections and sublayers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, static
from flaxen.layers.norm import Identity


@module
class Scaled:
    """x * factor: what a sublayer adds to the stream, made smaller (Granite)."""

    factor: static[float]

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jnp.asarray(self.factor, x.dtype)


@module
class Clipped:
    """Nothing outside of [-limit, limit], after `norm` (OLMo)."""

    norm: Any = Identity()
    limit: static[float]

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.clip(self.norm(x), -self.limit, self.limit)


@module
class PlainLayerNorm:
    """LayerNorm without weight and bias, in float32 (OLMo)."""

    eps: static[float]

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - jnp.mean(wide, -1, keepdims=True)
        return _unit(centred, self.eps, -1).astype(x.dtype)


@module
class PlainRMSNorm:
    """RMSNorm without a weight, in float32 (Llama 4)."""

    eps: static[float]

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return _unit(wide, self.eps, -1).astype(x.dtype)


@module
class RMSNormOfHeads:
    """RMSNorm over all heads of a token at once: x (B, T, N, H), weight (N, H) (OLMoE)."""

    weight: Any
    eps: static[float]

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return _unit(wide, self.eps, (-2, -1)).astype(x.dtype) * self.weight.astype(x.dtype)


@module
class WideRMSNorm:
    """RMSNorm over the axes of its weight; multiplies in float32 and casts once (OLMo 2)."""

    weight: Any
    eps: static[float]

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = _unit(wide, self.eps, tuple(range(-self.weight.ndim, 0)))
        return (y * self.weight.astype(y.dtype)).astype(x.dtype)


def _unit(x: jax.Array, eps: float, axes: int | tuple[int, ...]) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axes, keepdims=True) + eps)

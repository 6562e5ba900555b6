"""Normalisations. Statistics are float32; where the cast back happens is part of a model's
definition.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, ones_param, static, zeros_param


def _unit(x: jax.Array, eps: float) -> jax.Array:
    h = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + eps)


def _centred(x: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return _unit(wide - jnp.mean(wide, -1, keepdims=True), eps)


@module
class RMSNorm:
    """Llama's: normalise, cast back, then multiply by the weight."""

    weight: Any
    eps: static[float]

    def __call__(self, x: jax.Array) -> jax.Array:
        return _unit(x, self.eps).astype(x.dtype) * self.weight.astype(x.dtype)


@module
class OffsetRMSNorm:
    """Gemma's: multiply by 1 + weight in float32, cast once."""

    weight: Any
    eps: static[float]

    def __call__(self, x: jax.Array) -> jax.Array:
        h = _unit(x, self.eps)
        return (h * (1 + self.weight.astype(h.dtype))).astype(x.dtype)


@module
class LayerNorm:
    """Subtract the mean, normalise, weight and shift in float32, cast once. Without weight or bias
    that step is left out.

    With a weight of (heads, head_dim) each head has its own: x (..., heads, head_dim).
    """

    weight: Any = None
    bias: Any = None
    eps: static[float]

    def __call__(self, x: jax.Array) -> jax.Array:
        h = _centred(x, self.eps)
        h = h if self.weight is None else h * self.weight.astype(h.dtype)
        h = h if self.bias is None else h + self.bias.astype(h.dtype)
        return h.astype(x.dtype)


@module
class OffsetLayerNorm:
    """Nemotron's LayerNorm: multiply by 1 + weight, which is rounded to the weight's dtype."""

    weight: Any
    bias: Any
    eps: static[float]

    def __call__(self, x: jax.Array) -> jax.Array:
        h = _centred(x, self.eps)
        return (h * (1 + self.weight).astype(h.dtype) + self.bias.astype(h.dtype)).astype(x.dtype)


@module
class Scale:
    """Each channel times a number of its own."""

    weight: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.weight.astype(x.dtype)


@module
class Identity:
    """Where a family has no norm."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def rms_norm(eps: float, **axes: int) -> RMSNorm:
    return RMSNorm(weight=ones_param(**axes), eps=eps)


def offset_rms_norm(eps: float, **axes: int) -> OffsetRMSNorm:
    return OffsetRMSNorm(weight=zeros_param(**axes), eps=eps)


def layer_norm(eps: float, *, bias: bool = True, layout: str = "", **axes: int) -> LayerNorm:
    shift = zeros_param(layout, **axes) if bias else None
    return LayerNorm(weight=ones_param(layout, **axes), bias=shift, eps=eps)


def offset_layer_norm(eps: float, **axes: int) -> OffsetLayerNorm:
    return OffsetLayerNorm(weight=zeros_param(**axes), bias=zeros_param(**axes), eps=eps)

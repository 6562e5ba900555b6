"""RMS norms with a gate, at the end of a recurrent mixer."""

from __future__ import annotations

from typing import Any

import jax

from flaxen.core.tree import module, ones_param, static
from flaxen.layers.norm import _unit
from flaxen.layers.recurrence import wide


@module
class GateThenNorm:
    """Multiply by silu(gate), then normalise all channels of each of `groups` groups of heads, cast
    back, multiply by the weight (heads, head_dim): Mamba 2's.
    """

    weight: Any
    eps: static[float]
    groups: static[int] = 1

    def __call__(self, x: jax.Array, gate: jax.Array, dtype: Any) -> jax.Array:
        """x (B, T, heads, head_dim) in float32 -> the same shape in `dtype`."""
        y = x * jax.nn.silu(wide(gate))
        y = _unit(y.reshape(*y.shape[:2], self.groups, -1), self.eps).reshape(x.shape)
        return y.astype(dtype) * self.weight.astype(dtype)


@module
class NormThenGate:
    """Normalise each head, cast back, multiply by the weight (head_dim), then by silu(gate) in
    float32: the gated delta net's.
    """

    weight: Any
    eps: static[float]

    def __call__(self, x: jax.Array, gate: jax.Array, dtype: Any) -> jax.Array:
        """x (..., head_dim) in float32 -> the same shape in `dtype`."""
        y = _unit(x, self.eps).astype(dtype) * self.weight.astype(dtype)
        return (wide(y) * jax.nn.silu(wide(gate))).astype(dtype)


def gate_then_norm(eps: float, heads: int, head_dim: int, groups: int = 1) -> GateThenNorm:
    weight = ones_param("(heads head_dim)", heads=heads, head_dim=head_dim)
    return GateThenNorm(weight=weight, eps=eps, groups=groups)


def norm_then_gate(eps: float, head_dim: int) -> NormThenGate:
    return NormThenGate(weight=ones_param(head_dim=head_dim), eps=eps)

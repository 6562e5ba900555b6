"""xIELU (arXiv 2411.13010): an activation with weights of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, param
from flaxen.layers.context import Context
from flaxen.layers.linear import Linear, linear


@module
class XIELU:
    """Above zero a * x^2 + beta * x, below b * (exp(x) - 1 - x) + beta * x; a is the softplus of
    alpha_p, and b that of alpha_n, plus beta. beta and eps, the smallest distance from zero below
    it, lie in the file, but nothing learns them.
    """

    alpha_p: Any
    alpha_n: Any
    beta: Any
    eps: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        beta, eps = (jax.lax.stop_gradient(w).astype(x.dtype) for w in (self.beta, self.eps))
        above = jax.nn.softplus(self.alpha_p).astype(x.dtype)
        below = beta + jax.nn.softplus(self.alpha_n).astype(x.dtype)
        left = (jnp.expm1(jnp.minimum(x, eps)) - x) * below
        return jnp.where(x > 0, above * x * x, left) + beta * x


@module
class XIELUMLP:
    """down(xIELU(up(x)))."""

    up_proj: Linear
    act_fn: XIELU
    down_proj: Linear

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        """x (B, T, D) -> (B, T, D)."""
        return self.down_proj(self.act_fn(self.up_proj(x)))


def xielu_mlp(embed: int, mlp: int) -> XIELUMLP:
    """By sizes. In the file both alphas are lists of one number."""
    D, F = {"embed": embed}, {"mlp": mlp}
    return XIELUMLP(
        up_proj=linear(D, F),
        act_fn=XIELU(alpha_p=param("1"), alpha_n=param("1"), beta=param(), eps=param()),
        down_proj=linear(F, D),
    )

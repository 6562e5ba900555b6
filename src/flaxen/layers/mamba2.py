"""Mamba 2 (arXiv 2405.21060): a state space with one decay for each head.

B batch, T tokens, N heads, P head_dim, K groups of heads that share b and c, S states.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.cache import Order, Recurrent, states
from flaxen.core.checks import divides
from flaxen.core.tree import module, ones_param, static, zeros_param
from flaxen.layers.conv import ShortConv, short_conv
from flaxen.layers.decay import fading
from flaxen.layers.gated_norm import GateThenNorm
from flaxen.layers.linear import Linear, linear
from flaxen.layers.mlp import ACTIVATIONS
from flaxen.layers.recurrence import Line, Mixer, Past, wide
from flaxen.layers.runtime import Runtime


@module
class Mamba2(Mixer):
    """in_x is what goes through the states and in_z its gate; in_dt, in_b and in_c say of each
    token how long it lasts, how it enters the state and how it reads it. limit: of the step dt.
    """

    in_z: Linear
    in_x: Linear
    in_b: Linear
    in_c: Linear
    in_dt: Linear
    conv_x: ShortConv
    conv_b: ShortConv
    conv_c: ShortConv
    A_log: Any
    D: Any
    dt_bias: Any
    gate_norm: GateThenNorm
    out_proj: Linear
    act: static[str]
    limit: static[tuple[float, float]] = (0.0, math.inf)

    def mix(
        self, x: jax.Array, line: Line, past: Past | None, runtime: Runtime
    ) -> tuple[jax.Array, Past]:
        convs, state = past or ((None,) * 3, None)
        z, dt = self.in_z(x), wide(self.in_dt(x)) + wide(self.dt_bias)
        inner = (
            runtime.constrain(self.in_x(x), "batch", "tokens", "heads", "head_dim"),
            runtime.constrain(self.in_b(x), "batch", "tokens", "kv_heads", "state"),
            runtime.constrain(self.in_c(x), "batch", "tokens", "kv_heads", "state"),
        )
        filters = (self.conv_x, self.conv_b, self.conv_c)
        pairs = [f(y, line, old) for f, y, old in zip(filters, inner, convs, strict=True)]
        h, b, c = (wide(ACTIVATIONS[self.act](y)) for y, _ in pairs)
        dt = line.masked(jnp.clip(jax.nn.softplus(dt), *self.limit))
        y, state = self.scan(h, dt, b, c, state, line)
        y = self.gate_norm(y + h * wide(self.D)[:, None], z, x.dtype)
        return self.out_proj(y), (tuple(conv for _, conv in pairs), state)

    def scan(
        self,
        x: jax.Array,
        dt: jax.Array,
        b: jax.Array,
        c: jax.Array,
        state: jax.Array | None,
        line: Line,
    ) -> tuple[jax.Array, jax.Array]:
        """x (B, T, N, P), dt (B, T, N), b and c (B, T, K, S), state (B, N, P, S) -> y as x, and
        the new state.
        """
        B, T, N, P = x.shape
        K, S = b.shape[2:]
        decay = -jnp.exp(wide(self.A_log)) * dt
        v = (x * dt[..., None]).reshape(B, T, K, N // K, P)
        old = None if state is None else state.reshape(B, K, N // K, P, S)
        y, new = fading(c, b, v, decay.reshape(B, T, K, N // K), old, line.documents)
        return y.reshape(x.shape), new.reshape(B, N, P, S)

    def cache(self, order: Order) -> Recurrent:
        """The shapes of what this layer remembers."""
        convs = [f.memory for f in (self.conv_x, self.conv_b, self.conv_c)]
        heads, head_dim = self.in_x.weight.shape[-3:-1]
        state = {"heads": heads, "head_dim": head_dim, "state": self.in_b.weight.shape[-2]}
        return states(order, convs, state)


def mamba2(
    gate_norm: GateThenNorm,
    *,
    embed: int,
    groups: int,
    state: int,
    kernel: int,
    act: str,
    bias: bool = False,
    conv_bias: bool = True,
    **slots: Any,
) -> Mamba2:
    """Mamba 2 by sizes, with the heads of its norm. Groups are to heads what key heads are to
    query heads, and are cut as these are.

    Raises:
        ConfigError: heads that cannot be shared evenly among the groups.
    """
    ACTIVATIONS[act]
    sizes = gate_norm.weight.axes
    divides("groups", groups, "heads", sizes["heads"])
    D, N = {"embed": embed}, {"heads": sizes["heads"]}
    X, K = {**N, "head_dim": sizes["head_dim"]}, {"kv_heads": groups, "state": state}
    return Mamba2(
        in_z=linear(D, X, bias=bias),
        in_x=linear(D, X, bias=bias),
        in_b=linear(D, K, bias=bias),
        in_c=linear(D, K, bias=bias),
        in_dt=linear(D, N, bias=bias),
        conv_x=short_conv(kernel, X, bias=conv_bias),
        conv_b=short_conv(kernel, K, bias=conv_bias),
        conv_c=short_conv(kernel, K, bias=conv_bias),
        A_log=zeros_param(**N),
        D=ones_param(**N),
        dt_bias=ones_param(**N),
        gate_norm=gate_norm,
        out_proj=linear(X, D, bias=bias),
        act=act,
        **slots,
    )

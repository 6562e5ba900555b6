"""Mamba (arXiv 2312.00752): a selective state space, with a decay for each channel and state.

B batch, T tokens, F channels, S states of each.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.cache import Order, Recurrent, states
from flaxen.core.tree import module, ones_param, static, zeros_param
from flaxen.layers.conv import ShortConv, short_conv
from flaxen.layers.linear import Linear, linear
from flaxen.layers.mlp import ACTIVATIONS
from flaxen.layers.norm import Identity
from flaxen.layers.recurrence import Line, Mixer, Past, in_pieces, wide
from flaxen.layers.runtime import Runtime

SCAN = 32
"""Tokens whose states are held at once."""


@module
class Mamba(Mixer):
    """in_x is what goes through the states and in_z its gate; x_dt, x_b and x_c say of each token
    how long it lasts, how it enters the state and how it reads it.
    """

    in_x: Linear
    in_z: Linear
    conv1d: ShortConv
    x_dt: Linear
    x_b: Linear
    x_c: Linear
    dt_norm: Any = Identity()
    b_norm: Any = Identity()
    c_norm: Any = Identity()
    dt_proj: Linear
    A_log: Any
    D: Any
    out_proj: Linear
    act: static[str]

    def mix(
        self, x: jax.Array, line: Line, past: Past | None, runtime: Runtime
    ) -> tuple[jax.Array, Past]:
        (conv,), state = past or ((None,), None)
        z, x = self.in_z(x), runtime.constrain(self.in_x(x), "batch", "tokens", "mlp")
        x, conv = self.conv1d(x, line, conv)
        x = ACTIVATIONS[self.act](x)
        dt = self.dt_proj(self.dt_norm(self.x_dt(x)))
        b, c = self.b_norm(self.x_b(x)), self.c_norm(self.x_c(x))
        y, state = selective_scan(
            wide(x),
            line.masked(jax.nn.softplus(wide(dt))),
            -jnp.exp(wide(self.A_log)),
            wide(b),
            wide(c),
            state,
            line.starts,
        )
        y = (y + wide(x) * wide(self.D)) * jax.nn.silu(wide(z))
        return self.out_proj(y.astype(x.dtype)), ((conv,), state)

    def cache(self, order: Order) -> Recurrent:
        """The shapes of what this layer remembers."""
        channels, state = self.A_log.shape[-2:]
        return states(order, [self.conv1d.memory], {"mlp": channels, "state": state})


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    b: jax.Array,
    c: jax.Array,
    state: jax.Array | None = None,
    starts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t b_t and y_t = h_t c_t, with h = 0 before `starts`.

    x, dt (B, T, F); A (F, S); b, c (B, T, S); state (B, F, S) before the first token, else zeros
    -> y (B, T, F), and the state after the last one.
    """
    if state is None:
        state = jnp.zeros((x.shape[0], *A.shape), x.dtype)

    def step(state: jax.Array, piece: Any) -> tuple[jax.Array, jax.Array]:
        x, dt, b, c, starts = piece
        decay = jnp.exp(dt[..., None] * A)
        if starts is not None:
            decay = jnp.where(starts[..., None, None], 0, decay)
        new = (dt * x)[..., None] * b[:, :, None]
        decay, h = jax.lax.associative_scan(_after, (decay, new), axis=1)
        h = h + decay * state[:, None]
        return h[:, -1], jnp.einsum("BTFS,BTS->BTF", h, c)

    return _swapped(in_pieces(step, state, (x, dt, b, c, starts), SCAN))


def _after(first: Any, second: Any) -> Any:
    """Two steps h -> decay * h + new as one."""
    (d1, n1), (d2, n2) = first, second
    return d1 * d2, d2 * n1 + n2


def _swapped(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    return pair[1], pair[0]


def mamba(
    *,
    embed: int,
    mlp: int,
    state: int,
    rank: int,
    kernel: int,
    act: str,
    bias: bool = False,
    conv_bias: bool = True,
    **norms: Any,
) -> Mamba:
    """Mamba by sizes; `norms` are of dt, b and c. A plan cuts `mlp`, the channels."""
    ACTIVATIONS[act]
    D, F = {"embed": embed}, {"mlp": mlp}
    dt = linear({"rank": rank}, F, bias=True)
    return Mamba(
        in_x=linear(D, F, bias=bias),
        in_z=linear(D, F, bias=bias),
        conv1d=short_conv(kernel, F, bias=conv_bias),
        x_dt=linear(F, {"rank": rank}),
        x_b=linear(F, {"state": state}),
        x_c=linear(F, {"state": state}),
        dt_proj=dt,
        A_log=zeros_param(mlp=mlp, state=state),
        D=ones_param(mlp=mlp),
        out_proj=linear(F, D, bias=bias),
        act=act,
        **norms,
    )

"""Lightning attention (arXiv 2501.08313): linear attention that fades, each head at its own rate.

B batch, T tokens, N heads, H head_dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.cache import Order, Recurrent, states
from flaxen.core.tree import module, ones_param, static
from flaxen.layers.around import RMSNormOfHeads
from flaxen.layers.decay import fading
from flaxen.layers.linear import Linear, linear
from flaxen.layers.mlp import ACTIVATIONS
from flaxen.layers.recurrence import Line, Mixer, Past, wide
from flaxen.layers.runtime import Runtime


@module
class LightningAttention(Mixer):
    """act() of q, k and v; what the queries take of the state, normed over all heads and times
    sigmoid(output_gate(x)). slopes: how much of it each head loses from token to token, as a
    logarithm.
    """

    q: Linear
    k: Linear
    v: Linear
    norm_of_heads: Any
    output_gate: Linear
    out_proj: Linear
    act: static[str]
    slopes: static[tuple[float, ...]]

    def mix(
        self, x: jax.Array, line: Line, past: Past | None, runtime: Runtime
    ) -> tuple[jax.Array, Past]:
        lay = lambda y: runtime.constrain(y, "batch", "tokens", "heads", "head_dim")
        act = ACTIVATIONS[self.act]
        q, k, v = (wide(act(lay(p(x)))) for p in (self.q, self.k, self.v))
        decay = jnp.broadcast_to(-jnp.asarray(self.slopes, q.dtype), q.shape[:3])
        state = None if past is None or past[1] is None else past[1][:, :, None]
        y, state = fading(
            q,
            line.masked(k),
            v[:, :, :, None],
            line.masked(decay)[..., None],
            state,
            line.documents,
        )
        y = self.norm_of_heads(y[:, :, :, 0].astype(x.dtype))
        y = jax.nn.sigmoid(self.output_gate(x)) * y
        return self.out_proj(y), ((), state[:, :, 0])

    def cache(self, order: Order) -> Recurrent:
        """The shapes of what this layer remembers."""
        heads, head_dim = self.v.weight.shape[-3:-1]
        return states(order, (), {"heads": heads, "head_dim": head_dim, "state": head_dim})


def lightning_attention(
    *, embed: int, heads: int, head_dim: int, act: str, eps: float, depth: float
) -> LightningAttention:
    """By sizes. depth: how far up the layer stands, from 0 to 1: its memory lasts the longer."""
    ACTIVATIONS[act]
    D, N = {"embed": embed}, {"heads": heads, "head_dim": head_dim}
    return LightningAttention(
        q=linear(D, N),
        k=linear(D, N),
        v=linear(D, N),
        norm_of_heads=RMSNormOfHeads(weight=ones_param("(heads head_dim)", **N), eps=eps),
        output_gate=linear(D, N),
        out_proj=linear(N, D),
        act=act,
        slopes=tuple(2 ** (-8 * (i + 1) / heads) * (1 - depth + 1e-5) for i in range(heads)),
    )

"""The gated delta rule (arXiv 2412.06464): a fading memory in which a token replaces what stood
under its key.

In a piece, what each token writes depends on what earlier ones wrote: a triangular system, solved
for all tokens at once. B batch, T tokens, L tokens of a piece, K key heads, G value heads of each
key head, S key channels, P value channels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.cache import Order, Recurrent, states
from flaxen.core.checks import divides
from flaxen.core.tree import module, ones_param, static, zeros_param
from flaxen.layers.conv import ShortConv, short_conv
from flaxen.layers.decay import Fade, first_document
from flaxen.layers.gated_norm import NormThenGate, norm_then_gate
from flaxen.layers.linear import Linear, linear
from flaxen.layers.mlp import ACTIVATIONS
from flaxen.layers.recurrence import Line, Mixer, Past, in_pieces, wide
from flaxen.layers.runtime import Runtime


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    state: jax.Array | None = None,
    documents: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """state' = exp(decay_t) state_{t-1}; state_t = state' + beta_t (v_t - state' k_t) k_t and
    y_t = state_t q_t, the state beginning with zeros in each of the `documents` (B, T).

    q, k (B, T, K, S); v (B, T, K, G, P); decay, not above 0, and beta (B, T, K, G); state
    (B, K, G, P, S) before the first token, else zeros -> y as v, and the state after the last one.
    """
    B, _, K, S = k.shape
    if state is None:
        state = jnp.zeros((B, K, *v.shape[3:], S), v.dtype)

    def step(carry: Any, piece: Any) -> Any:
        state, document = carry
        q, k, v, decay, beta, documents = piece
        fade = Fade(decay, documents, document)
        before = jnp.einsum("BTKS,BKGPS->BTKGP", k, state) * fade.since[..., None]
        known = jnp.einsum("BTKS,BLKS->BKTL", k, k)[:, :, None] * fade.table
        known = known * jnp.moveaxis(beta, 1, 3)[..., None]
        written = _solved(known, (v - before) * beta[..., None])
        scores = jnp.einsum("BTKS,BLKS->BKTL", q, k)[:, :, None] * fade.table
        y = jnp.einsum("BKGTL,BLKGP->BTKGP", scores, written)
        y = y + fade.since[..., None] * jnp.einsum("BTKS,BKGPS->BTKGP", q, state)
        new = jnp.einsum("BLKGP,BLKS->BKGPS", written * fade.until[..., None], k)
        return (fade.whole[..., None, None] * state + new, fade.document), y

    xs = (q, k, v, decay, beta, documents)
    (last, _), y = in_pieces(step, (state, first_document(documents)), xs)
    return y, last


def _solved(known: jax.Array, wanted: jax.Array) -> jax.Array:
    """(1 + the part of `known` (B, K, G, T, L) below its diagonal) x = wanted (B, L, K, G, P)."""
    if wanted.shape[1] == 1:
        return wanted
    x = jax.lax.linalg.triangular_solve(
        known, jnp.moveaxis(wanted, 1, 3), left_side=True, lower=True, unit_diagonal=True
    )
    return jnp.moveaxis(x, 3, 1)


@module
class GatedDeltaNet(Mixer):
    """in_q, in_k and in_v are filtered by their convolutions; in_z gates the output, in_a says how
    much is kept of the state and in_b how much of it a token replaces.
    """

    in_q: Linear
    in_k: Linear
    in_v: Linear
    in_z: Linear
    in_b: Linear
    in_a: Linear
    conv_q: ShortConv
    conv_k: ShortConv
    conv_v: ShortConv
    A_log: Any
    dt_bias: Any
    gate_norm: NormThenGate
    out_proj: Linear
    act: static[str]

    def mix(
        self, x: jax.Array, line: Line, past: Past | None, runtime: Runtime
    ) -> tuple[jax.Array, Past]:
        convs, state = past or ((None,) * 3, None)
        keys = ("batch", "tokens", "kv_heads", "head_dim")
        inner = (
            runtime.constrain(self.in_q(x), *keys),
            runtime.constrain(self.in_k(x), *keys),
            runtime.constrain(self.in_v(x), *keys[:3], "group", "head_dim"),
        )
        filters = (self.conv_q, self.conv_k, self.conv_v)
        pairs = [f(y, line, old) for f, y, old in zip(filters, inner, convs, strict=True)]
        q, k, v = (wide(ACTIVATIONS[self.act](y)) for y, _ in pairs)
        dt = jax.nn.softplus(wide(self.in_a(x)) + wide(self.dt_bias))
        y, state = delta_rule(
            _of_length_one(q) * q.shape[-1] ** -0.5,
            _of_length_one(k),
            v,
            line.masked(-jnp.exp(wide(self.A_log)) * dt),
            line.masked(jax.nn.sigmoid(wide(self.in_b(x)))),
            state,
            line.documents,
        )
        y = self.gate_norm(y, self.in_z(x), x.dtype)
        return self.out_proj(y), (tuple(conv for _, conv in pairs), state)

    def cache(self, order: Order) -> Recurrent:
        """The shapes of what this layer remembers."""
        convs = [f.memory for f in (self.conv_q, self.conv_k, self.conv_v)]
        heads, group, head_dim = self.in_v.weight.shape[-4:-1]
        values = {"kv_heads": heads, "group": group, "head_dim": head_dim}
        return states(order, convs, {**values, "state": self.in_k.weight.shape[-2]})


def _of_length_one(x: jax.Array) -> jax.Array:
    # The epsilon is the reference's, which has no setting for it.
    return x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def gated_delta_net(
    *,
    embed: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    kernel: int,
    act: str,
    eps: float,
) -> GatedDeltaNet:
    """By sizes; each key head serves value_heads / key_heads value heads.

    Raises:
        ConfigError: value heads that cannot be shared evenly among the key heads.
    """
    ACTIVATIONS[act]
    divides("key heads", key_heads, "value heads", value_heads)
    D, K = {"embed": embed}, {"kv_heads": key_heads}
    G = {**K, "group": value_heads // key_heads}
    H, V = {**K, "head_dim": key_dim}, {**G, "head_dim": value_dim}
    return GatedDeltaNet(
        in_q=linear(D, H),
        in_k=linear(D, H),
        in_v=linear(D, V),
        in_z=linear(D, V),
        in_b=linear(D, G),
        in_a=linear(D, G),
        conv_q=short_conv(kernel, H),
        conv_k=short_conv(kernel, H),
        conv_v=short_conv(kernel, V),
        A_log=zeros_param("(kv_heads group)", **G),
        dt_bias=ones_param("(kv_heads group)", **G),
        gate_norm=norm_then_gate(eps, value_dim),
        out_proj=linear(V, D),
        act=act,
    )

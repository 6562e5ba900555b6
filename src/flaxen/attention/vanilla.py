"""Attention as written on paper: every score at once. The reference for all others.

B batch, T queries, S keys, N heads, K kv_heads, G group, H head_dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flaxen.attention.call import NOTHING, Call, Extras, Scene, visible, without_unseen
from flaxen.attention.choose import Mechanism, register
from flaxen.attention.online import dropout_factors, score_bias


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    """Weights in float32, then their mixture of values, accumulated in float32."""
    k, v = without_unseen(k, v, call.mask, scene)
    p = _weights(q, k, call, scene, extras)
    p = p.reshape(q.shape[0], call.kv_heads, call.group, *p.shape[2:])
    wide = jnp.promote_types(v.dtype, jnp.float32)
    y = jnp.einsum("BKGTS,BSKH->BTKGH", p.astype(v.dtype), v, preferred_element_type=wide)
    return y.reshape(*q.shape[:3], v.shape[-1]).astype(v.dtype)


def weights(
    q: jax.Array, k: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING
) -> jax.Array:
    """How much each query takes of each key, (B, N, T, S), float32: a row adds up to one, less what
    a sink takes, or to zero where nothing is seen.
    """
    return _weights(q, without_unseen(k, k, call.mask, scene)[0], call, scene, extras)


def _weights(q: jax.Array, k: jax.Array, call: Call, scene: Scene, extras: Extras) -> jax.Array:
    B, T, N, H = q.shape
    K, S = k.shape[2], k.shape[1]
    s = jnp.einsum(
        "BTKGH,BSKH->BKGTS",
        q.reshape(B, T, K, N // K, H),
        k,
        preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),
    )
    s = s.reshape(B, N, T, S) * call.scale
    if call.softcap:
        s = call.softcap * jnp.tanh(s / call.softcap)
    bias = score_bias(scene, extras)
    s = s if bias is None else s + bias.astype(s.dtype)
    sinks = None if extras.sinks is None else extras.sinks[:, None, None]
    p = masked_softmax(s, visible(call.mask, scene)[:, None], sinks)
    if call.dropout and extras.dropout_key is not None:
        p = p * dropout_factors(extras.dropout_key, call.dropout, p.shape)
    return p


def masked_softmax(s: jax.Array, see: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    """Softmax over the last axis where `see`; exactly 0 elsewhere, and in rows that see nothing.

    `sinks` is one more score for each row, whose weight is left out of the result.
    """
    s = jnp.where(see, s, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True))
    if sinks is not None:
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks).astype(s.dtype))
    top = jnp.where(jnp.isfinite(top), top, 0)
    e = jnp.exp(jnp.where(see, s - top, -jnp.inf))
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(s.dtype) - top)
    return e / jnp.where(total > 0, total, 1)


register(Mechanism("vanilla", attend, refuse=lambda call: None, prefer=lambda call: 0))

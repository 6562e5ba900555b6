"""Attention as written on paper: every score at once. The reference for all others.

B batch, T queries, S keys, K kv_heads, G group, H head_dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flaxen.attention.call import NOTHING, Call, Extras, Scene, visible
from flaxen.attention.choose import Mechanism, register


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    """Softmax in float32; keys that no query may see are zeroed, so that garbage in unused slots
    cannot leak.
    """
    B, T, N, _ = q.shape
    v = jnp.where(visible(call.mask, scene).any(axis=1)[:, :, None, None], v, 0)
    p = weights(q, k, call, scene, extras).reshape(B, k.shape[2], -1, T, k.shape[1])
    if call.dropout and extras.dropout_key is not None:
        kept = jax.random.bernoulli(extras.dropout_key, 1 - call.dropout, p.shape)
        p = jnp.where(kept, p / (1 - call.dropout), 0)
    y = jnp.einsum("BKGTS,BSKH->BTKGH", p.astype(v.dtype), v)
    return y.reshape(B, T, N, v.shape[-1])


def weights(
    q: jax.Array, k: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING
) -> jax.Array:
    """How much of each key a query takes, (B, N, T, S), in float32; sinks take the rest."""
    B, T, N, H = q.shape
    K, S = k.shape[2], k.shape[1]
    see = visible(call.mask, scene)[:, None, None]  # B 1 1 T S
    s = jnp.einsum(
        "BTKGH,BSKH->BKGTS",
        q.reshape(B, T, K, N // K, H),
        k,
        preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),
    )
    s = s * call.scale
    if call.softcap:
        s = call.softcap * jnp.tanh(s / call.softcap)
    s = s + added(extras, scene, (K, N // K, T, S)).astype(s.dtype)
    sinks = None if extras.sinks is None else extras.sinks.reshape(K, N // K, 1, 1)
    return masked_softmax(s, see, sinks).reshape(B, N, T, S)


def added(extras: Extras, scene: Scene, shape: tuple[int, int, int, int]) -> jax.Array:
    """Bias and ALiBi as one array that broadcasts to (B, K, G, T, S), for shape (K, G, T, S)."""
    K, G, T, S = shape
    total = jnp.zeros((1, 1, 1, 1, 1), jnp.float32)
    if extras.bias is not None:
        bias = jnp.broadcast_to(extras.bias, (extras.bias.shape[0], K * G, T, S))
        total = total + bias.reshape(-1, K, G, T, S)
    if extras.slopes is not None:
        far = abs(scene.q_slots[..., :, None] - scene.k_slots[..., None, :])
        far = far if far.ndim == 3 else far[None]
        total = total - extras.slopes.reshape(K, G, 1, 1) * far[:, None, None]
    return total


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


register(Mechanism("vanilla", attend, refuse=lambda call: None, prefer=lambda call: 1))

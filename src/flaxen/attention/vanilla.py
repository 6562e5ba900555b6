"""Attention as written on paper: every score at once. The reference for all others."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flaxen.attention.call import Call, Scene, visible
from flaxen.attention.choose import Mechanism, register


def attend(q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene) -> jax.Array:
    """Softmax in float32; keys that no query may see are zeroed, so that garbage in unused slots
    cannot leak.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    see = visible(call.mask, scene)[:, None, None]  # B 1 1 T S
    v = jnp.where(see.any(axis=(1, 2, 3))[:, :, None, None], v, 0)
    s = jnp.einsum(
        "BTKGH,BSKH->BKGTS",
        q.reshape(B, T, K, N // K, H),
        k,
        preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),
    )
    s = s * call.scale
    if call.softcap:
        s = call.softcap * jnp.tanh(s / call.softcap)
    p = masked_softmax(s, see)
    y = jnp.einsum("BKGTS,BSKH->BTKGH", p.astype(v.dtype), v)
    return y.reshape(B, T, N, v.shape[-1])


def masked_softmax(s: jax.Array, see: jax.Array) -> jax.Array:
    """Softmax over the last axis where `see`; exactly 0 elsewhere, and in rows that see nothing."""
    s = jnp.where(see, s, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True))
    e = jnp.exp(jnp.where(see, s - jnp.where(jnp.isfinite(top), top, 0), -jnp.inf))
    total = e.sum(-1, keepdims=True)
    return e / jnp.where(total > 0, total, 1)


register(Mechanism("vanilla", attend, refuse=lambda call: None, prefer=lambda call: 1))

"""Turning pairs of channels by an angle: the two ways in which models pair them."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, interleaved: bool = False) -> jax.Array:
    """Turn the first 2 * half channels of each head. x: (B, T, heads, H), cos and sin: (B, T,
    half).
    """
    dim = 2 * cos.shape[-1]
    turned, rest = x[..., :dim].astype(cos.dtype), x[..., dim:]
    turn = neighbours if interleaved else halves
    y = turn(turned, cos[:, :, None], sin[:, :, None]).astype(x.dtype)
    return jnp.concatenate([y, rest], -1) if rest.shape[-1] else y


def halves(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Channel i turns with channel i + half (Llama)."""
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def neighbours(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Channel 2i turns with channel 2i + 1 (GPT-J)."""
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)

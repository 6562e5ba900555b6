"""Descriptions of attention: small, hashable, readable by a mechanism before any array exists."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, static


@dataclasses.dataclass(frozen=True)
class Mask:
    """Which earlier slots a query may see. `window` counts the query itself: 4 means it and three
    before.
    """

    causal: bool = True
    window: int | None = None


@module
class Scene:
    """Where queries and keys stand in their sequence, and which keys exist.

    q_slots: (T,), k_slots: (S,) slot numbers; keep: (B, S) False for padding and unused slots;
    q_segments (B, T), k_segments (B, S): documents packed into a row see only themselves.
    `aligned` says that query i stands at key i, so that a mechanism may skip the upper triangle.
    """

    q_slots: jax.Array
    k_slots: jax.Array
    keep: jax.Array | None = None
    q_segments: jax.Array | None = None
    k_segments: jax.Array | None = None
    aligned: static[bool] = False


def visible(mask: Mask, scene: Scene) -> jax.Array:
    """The mask spelled out: (B or 1, T, S), True where a query sees a key."""
    q, k = scene.q_slots[:, None], scene.k_slots[None, :]
    see = jnp.ones(jnp.broadcast_shapes(q.shape, k.shape), bool)
    if mask.causal:
        see = see & (k <= q)
    if mask.window:
        see = see & (q - k < mask.window)
        if not mask.causal:
            see = see & (k - q < mask.window)
    see = see[None]
    if scene.keep is not None:
        see = see & scene.keep[:, None, :]
    if scene.q_segments is not None and scene.k_segments is not None:
        see = see & (scene.q_segments[:, :, None] == scene.k_segments[:, None, :])
    return see


@dataclasses.dataclass(frozen=True)
class Call:
    """Everything about one attention call except its arrays."""

    mask: Mask
    scale: float
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    platform: str
    aligned: bool = False
    softcap: float | None = None
    sharded: bool = False

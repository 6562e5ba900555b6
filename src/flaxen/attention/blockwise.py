"""Exact attention in plain products: query heads folded into rows, hidden halves never computed.

B batch, T queries, S keys, N heads, K kv_heads, G group, H head_dim. Heads are major: rows of
(B, K, G*T, H) make grouped attention two plain batched products. Softmax is in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flaxen.attention.call import NOTHING, Call, Extras, Scene, visible
from flaxen.attention.choose import Mechanism, register
from flaxen.core.dot import arithmetic, product

SCORES = (((3,), (3,)), ((0, 1), (0, 1)))
MIX = (((3,), (2,)), ((0, 1), (0, 1)))
HIDDEN = -1e30


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    """A sequence to itself by triangular blocks, queries to a cache by one product."""
    if not (call.aligned and call.mask.causal):
        major = (jnp.swapaxes(x, 1, 2) for x in (k, v))
        see = visible(call.mask, scene)
        return decode_one(q, *major, scale=call.scale, keep=see, softcap=call.softcap)
    keep = None if scene.keep is None else scene.keep[:, None, :]
    if scene.q_segments is not None and scene.k_segments is not None:
        same = scene.q_segments[:, :, None] == scene.k_segments[:, None, :]
        keep = same if keep is None else same & keep
    window, softcap = call.mask.window, call.softcap
    return triangular(q, k, v, scale=call.scale, window=window, softcap=softcap, keep=keep)


def triangular(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    keep: jax.Array | None = None,
    block: int = 128,
) -> jax.Array:
    """Causal attention of a sequence to itself: query i and key i share a position.

    q: (B, T, N, H), k: (B, T, K, H), v: (B, T, K, Hv), keep: (B, T or 1, T) of bool
    -> (B, T, N, Hv). `window` counts the keys a query sees, its own included. A query that sees no
    key gives zeros; a key that `keep` hides from all queries may hold anything.
    """
    k, v = _major(k, keep), _major(v, keep)
    q = _grouped(q, k.shape[1])
    wide = arithmetic(q.dtype)
    qs, ks, vs = q.astype(wide), k.astype(wide), v.astype(wide)
    outs = []
    for start in range(0, q.shape[3], block):
        stop = min(start + block, q.shape[3])
        first = max(0, start - window + 1) if window else 0
        seen = _visible(start, stop, first, window)
        if keep is not None:
            rows = keep if keep.shape[1] == 1 else keep[:, start:stop]
            seen = seen & rows[:, :, first:stop]
        outs.append(
            _attend(
                qs[:, :, :, start:stop],
                ks[:, :, first:stop],
                vs[:, :, first:stop],
                seen,
                scale,
                softcap,
            )
        )
    out = jnp.concatenate(outs, axis=3)
    return _flat(out).astype(v.dtype)


def decode_one(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    scale: float,
    keep: jax.Array,
    softcap: float | None = None,
) -> jax.Array:
    """Attention of a few queries to a cache.

    q: (B, T, N, H), k_cache: (B, K, S, H), v_cache: (B, K, S, Hv), keep: (B, T, S) of bool
    -> (B, T, N, Hv). A query that sees no slot gives zeros; a slot hidden from all queries may hold
    anything.
    """
    used = jnp.any(keep, axis=1)[:, None, :, None]
    out = _attend(
        _grouped(q, k_cache.shape[1]),
        jnp.where(used, k_cache, 0),
        jnp.where(used, v_cache, 0),
        keep,
        scale,
        softcap,
    )
    return _flat(out).astype(q.dtype)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """Of q: (B, K, G, T, H) to k: (B, K, S, H), v: (B, K, S, Hv) where seen: (B or 1, T, S)."""
    grouped = q.shape[:4]
    q = q.reshape(*grouped[:2], -1, q.shape[4])
    scores = product(q, k, SCORES).reshape(*grouped, -1) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    # Adding is twice as fast as selecting: it fuses into the passes that take maximum and exponent.
    scores = scores + jnp.where(seen, 0, HIDDEN).astype(scores.dtype)[:, None, None]
    # The shift cancels in the quotient, so no gradient needs to pass through it.
    exps = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(exps, axis=-1, keepdims=True)
    mixed = product(exps.reshape(*q.shape[:3], -1).astype(v.dtype), v, MIX)
    out = mixed.reshape(*grouped, -1) / total
    return jnp.where(jnp.any(seen, axis=-1)[:, None, None, :, None], out, 0)


def _visible(start: int, stop: int, first: int, window: int | None) -> jax.Array:
    """(1, queries, keys): which of the keys from `first` on the queries from `start` on may see."""
    behind = jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)
    return ((behind >= 0) & (behind < window if window else True))[None]


def _major(x: jax.Array, keep: jax.Array | None) -> jax.Array:
    """(B, S, K, H) -> (B, K, S, H); rows that no query may see become zeros, for 0 * NaN is NaN."""
    if keep is not None:
        x = jnp.where(jnp.any(keep, axis=1)[:, :, None, None], x, 0)
    return jnp.swapaxes(x, 1, 2)


def _grouped(q: jax.Array, kv_heads: int) -> jax.Array:
    """(B, T, N, H) -> (B, K, G, T, H)."""
    batch, length, heads, width = q.shape
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, width)
    return jnp.transpose(q, (0, 2, 3, 1, 4))


def _flat(x: jax.Array) -> jax.Array:
    """(B, K, G, T, H) -> (B, T, N, H)."""
    batch, kv_heads, group, length, width = x.shape
    return jnp.transpose(x, (0, 3, 1, 2, 4)).reshape(batch, length, kv_heads * group, width)


def refuse(call: Call) -> str | None:
    if call.sinks or call.bias or call.alibi or call.dropout:
        return "it has no bias, sinks or dropout"
    if call.mask.chunk or call.mask.prefix:
        return "it has no chunks or prefixes"
    return None


register(
    Mechanism(
        "blockwise",
        attend,
        refuse=refuse,
        prefer=lambda call: 3 if call.platform == "cpu" else 0,
    )
)

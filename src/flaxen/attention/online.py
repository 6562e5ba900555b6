"""Softmax over keys that come block by block, and its gradients block by block.

B batch, K kv_heads, G group, T queries, S keys of one block, H head_dim. Query heads are folded
into rows, (B, K, G*T, H), so that grouped attention is plain batched products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flaxen.attention.call import Extras, Mask, Scene, visible
from flaxen.core.dot import product
from flaxen.core.tree import module

OVER_CHANNELS = (((3,), (3,)), ((0, 1), (0, 1)))
OVER_KEYS = (((3,), (2,)), ((0, 1), (0, 1)))
OVER_ROWS = (((2,), (2,)), ((0, 1), (0, 1)))


@module
class Running:
    """What the keys seen so far add up to: total (B, K, G, T, 1) is the sum of exp(score - top),
    mixed (B, K, G, T, Hv) that of the values with the same weights; float32 at least.
    """

    top: jax.Array
    total: jax.Array
    mixed: jax.Array


def start(q: jax.Array, v_head_dim: int) -> Running:
    """Before any key. q: (B, K, G, T, H)."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    one = jnp.zeros((*q.shape[:4], 1), wide)
    return Running(top=one - jnp.inf, total=one, mixed=jnp.zeros((*q.shape[:4], v_head_dim), wide))


def step(
    now: Running,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    terms: jax.Array,
    *,
    scale: float,
    softcap: float | None = None,
    kept: jax.Array | None = None,
) -> Running:
    """One more block. q: (B, K, G, T, H), k: (B, K, S, H), v: (B, K, S, Hv); `terms` from
    `score_terms`; `kept` are the factors of dropout, (B, K, G, T, S).
    """
    _, s = scores(q, k, terms, scale, softcap)
    # The shift cancels in the quotient, so no gradient needs to pass through it.
    top = jnp.maximum(now.top, jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True)))
    base = _finite(top)
    e = jnp.exp(s - base)
    past = jnp.exp(now.top - base)
    total = now.total * past + jnp.sum(e, axis=-1, keepdims=True)
    e = e if kept is None else e * kept
    more = product(_rows(e).astype(v.dtype), v, OVER_KEYS).reshape(now.mixed.shape)
    return Running(top=top, total=total, mixed=now.mixed * past + more)


def finish(now: Running, sinks: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The result (B, K, G, T, Hv) and the logarithm of the softmax's denominator (B, K, G, T, 1).

    A query that saw nothing gives zeros. sinks: (N,), one more score that has no value.
    """
    if sinks is not None:
        sinks = sinks.reshape(*now.top.shape[1:3], 1, 1).astype(now.top.dtype)
        top = jnp.maximum(now.top, jax.lax.stop_gradient(sinks))
        past = jnp.exp(now.top - top)
        now = Running(
            top=top, total=now.total * past + jnp.exp(sinks - top), mixed=now.mixed * past
        )
    total = jnp.where(now.total > 0, now.total, 1)
    return now.mixed / total, _finite(now.top) + jnp.log(total)


def block_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
    lse: jax.Array,
    mean: jax.Array,
    terms: jax.Array,
    *,
    scale: float,
    softcap: float | None = None,
    kept: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What one block of keys adds to the gradients of q, k and v, in their shapes, and the gradient
    of its scores (B, K, G, T, S), from which those of bias and slopes are sums. All float32.

    grad: (B, K, G, T, Hv) of the result, in the dtype of v; lse: from `finish`; mean: from
    `weighted_mean`.
    """
    capped, s = scores(q, k, terms, scale, softcap)
    p = jnp.exp(s - lse)
    dp = product(_rows(grad), v, OVER_CHANNELS).reshape(p.shape)
    used = p if kept is None else p * kept
    dv = product(_rows(used).astype(v.dtype), _rows(grad), OVER_ROWS)
    ds = p * ((dp if kept is None else dp * kept) - mean)
    inner = ds * (1 - (capped / softcap) ** 2) if softcap else ds
    inner = _rows(inner).astype(q.dtype)
    dq = product(inner, k, OVER_KEYS).reshape(q.shape) * scale
    dk = product(inner, _rows(q), OVER_ROWS) * scale
    return dq, dk, dv, ds


def weighted_mean(out: jax.Array, grad: jax.Array) -> jax.Array:
    """Of the gradients of the weights: (B, K, G, T, 1), read off the result itself."""
    return jnp.sum(out.astype(grad.dtype) * grad, axis=-1, keepdims=True)


def sink_gradients(sinks: jax.Array, lse: jax.Array, mean: jax.Array) -> jax.Array:
    """(N,): a sink takes weight from values and gives none back."""
    weight = jnp.exp(sinks.reshape(*lse.shape[1:3], 1, 1).astype(lse.dtype) - lse)
    return -jnp.sum(weight * mean, axis=(0, 3, 4)).reshape(-1).astype(sinks.dtype)


def scores(
    q: jax.Array, k: jax.Array, terms: jax.Array, scale: float, softcap: float | None
) -> tuple[jax.Array, jax.Array]:
    """(B, K, G, T, S) before and after `terms` are added."""
    s = product(_rows(q), k, OVER_CHANNELS).reshape(*q.shape[:4], -1) * scale
    s = softcap * jnp.tanh(s / softcap) if softcap else s
    # Adding -inf is twice as fast as selecting: it fuses into the passes that follow.
    return s, s + terms.astype(s.dtype)


def score_terms(mask: Mask, scene: Scene, extras: Extras, kv_heads: int) -> jax.Array:
    """What is added to the scores, broadcasting to (B, K, G, T, S): bias, ALiBi, and -inf where a
    query does not see a key.
    """
    hidden = jnp.where(visible(mask, scene), 0.0, -jnp.inf)[:, None, None]
    bias = score_bias(scene, extras)
    if bias is None:
        return hidden
    split = (kv_heads, -1) if bias.shape[1] > 1 else (1, 1)
    return hidden + bias.reshape(bias.shape[0], *split, *bias.shape[2:])


def score_bias(scene: Scene, extras: Extras) -> jax.Array | None:
    """Bias and ALiBi together, (B or 1, N or 1, T, S), if there are any."""
    if extras.slopes is None:
        return extras.bias
    alibi = -extras.slopes[:, None, None] * distance(scene)
    return alibi if extras.bias is None else extras.bias + alibi


def distance(scene: Scene) -> jax.Array:
    """(B or 1, 1, T, S): how far apart queries and keys stand."""
    far = abs(scene.q_slots[..., :, None] - scene.k_slots[..., None, :])
    return (far if far.ndim == 3 else far[None])[:, None]


def dropout_factors(key: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
    """0 for what is dropped, and for the rest what makes up for it."""
    return jnp.where(jax.random.bernoulli(key, 1 - rate, shape), 1 / (1 - rate), 0)


def grouped(q: jax.Array, kv_heads: int) -> jax.Array:
    """(B, T, N, H) -> (B, K, G, T, H)."""
    batch, length, heads, width = q.shape
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, width)
    return jnp.transpose(q, (0, 2, 3, 1, 4))


def flat(x: jax.Array) -> jax.Array:
    """(B, K, G, T, H) -> (B, T, N, H)."""
    batch, kv_heads, group, length, width = x.shape
    return jnp.transpose(x, (0, 3, 1, 2, 4)).reshape(batch, length, kv_heads * group, width)


def _rows(x: jax.Array) -> jax.Array:
    """(B, K, G, T, H) -> (B, K, G*T, H)."""
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def _finite(top: jax.Array) -> jax.Array:
    """A query that has seen nothing yet has no maximum; any number serves."""
    return jnp.where(jnp.isfinite(top), top, 0)

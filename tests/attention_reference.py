"""Attention and its gradients in float64 NumPy, straight from the definition.

B batch, T queries, S keys, N heads, K kv_heads, G group, H head_dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from flaxen.attention import NOTHING, Call, Extras, Scene


def sees(call: Call, scene: Scene, batch: int) -> np.ndarray:
    """(B, T, S): which key each query may see, one pair at a time."""
    q, k = (np.asarray(x) for x in (scene.q_slots, scene.k_slots))
    q, k = (np.broadcast_to(x, (batch, x.shape[-1])) for x in (q, k))
    scene = jax.tree.map(np.asarray, scene)  # one number of a jax array at a time is slow
    mask, out = call.mask, np.zeros((batch, q.shape[1], k.shape[1]), bool)
    for b, t, s in np.ndindex(*out.shape):
        i, j = int(q[b, t]), int(k[b, s])
        see = j <= i if mask.causal else True
        if mask.window:
            see &= i - j < mask.window if mask.causal else abs(i - j) <= mask.window
        if mask.chunk:
            see &= i // mask.chunk == j // mask.chunk
        if mask.prefix and scene.prefix is not None:
            first = int(scene.prefix[b])
            see |= i < first and j < first
        if scene.keep is not None:
            see &= bool(scene.keep[b, s])
        if scene.q_segments is not None and scene.k_segments is not None:
            see &= int(scene.q_segments[b, t]) == int(scene.k_segments[b, s])
        out[b, t, s] = see
    return out


def attention(
    q: Any, k: Any, v: Any, call: Call, scene: Scene, extras: Extras = NOTHING
) -> np.ndarray:
    """(B, T, N, Hv) float64; a query that sees nothing gives zeros."""
    return _run(q, k, v, call, scene, extras)[0]


def gradients(
    q: Any, k: Any, v: Any, call: Call, scene: Scene, out_grad: Any, extras: Extras = NOTHING
) -> dict[str, np.ndarray]:
    """Of sum(out * out_grad) in q, k, v, and in each part of the extras, float64."""
    _, p, capped, see, k, v, q = _run(q, k, v, call, scene, extras)
    B, K, G, T, S = p.shape
    do = np.asarray(out_grad, np.float64).reshape(B, T, K, G, -1)
    dv = np.einsum("BKGTS,BTKGH->BSKH", p, do)
    dp = np.einsum("BTKGH,BSKH->BKGTS", do, v)
    mean = (dp * p).sum(-1, keepdims=True)
    ds = p * (dp - mean)
    found: dict[str, np.ndarray] = {}
    if extras.bias is not None:
        whole = ds.reshape(B, K * G, T, S)
        axes = tuple(i for i in (0, 1) if extras.bias.shape[i] == 1)
        found["bias"] = whole.sum(axes, keepdims=True)
    if extras.slopes is not None:
        found["slopes"] = -(ds * _distance(scene, B)[:, None, None]).sum((0, 3, 4)).reshape(-1)
    if extras.sinks is not None:
        # The sink's own weight is what the others leave of one.
        rest = np.where(see.any(-1)[:, None, None], 1 - p.sum(-1), 0)
        found["sinks"] = -(rest * mean[..., 0]).sum((0, 3)).reshape(-1)
    if call.softcap:
        ds = ds * (1 - (capped / call.softcap) ** 2)
    ds = ds * call.scale
    found["q"] = np.einsum("BKGTS,BSKH->BTKGH", ds, k).reshape(B, T, K * G, -1)
    found["k"] = np.einsum("BKGTS,BTKGH->BSKH", ds, q)
    return found | {"v": dv}


def _run(q: Any, k: Any, v: Any, call: Call, scene: Scene, extras: Extras) -> Any:
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    see = sees(call, scene, B)
    hidden = ~see.any(1)[:, :, None, None]
    k, v = np.where(hidden, 0, k), np.where(hidden, 0, v)
    q = q.reshape(B, T, K, N // K, H)
    capped = np.einsum("BTKGH,BSKH->BKGTS", q, k) * call.scale
    if call.softcap:
        capped = call.softcap * np.tanh(capped / call.softcap)
    scores = capped
    if extras.bias is not None:
        bias = np.asarray(extras.bias, np.float64)
        bias = np.broadcast_to(bias, (bias.shape[0], N, T, S))
        scores = scores + bias.reshape(-1, K, N // K, T, S)
    if extras.slopes is not None:
        slopes = np.asarray(extras.slopes, np.float64).reshape(K, -1, 1, 1)
        scores = scores - slopes * _distance(scene, B)[:, None, None]
    scores = np.where(see[:, None, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    sinks = None
    if extras.sinks is not None:
        sinks = np.asarray(extras.sinks, np.float64).reshape(K, -1, 1, 1)
        top = np.maximum(top, sinks)
    top = np.where(np.isfinite(top), top, 0)
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks - top))
    p = e / np.where(total > 0, total, 1)
    out = np.einsum("BKGTS,BSKH->BTKGH", p, v).reshape(B, T, N, v.shape[-1])
    return out, p, capped, see, k, v, q


def _distance(scene: Scene, batch: int) -> np.ndarray:
    q, k = (np.asarray(x, np.float64) for x in (scene.q_slots, scene.k_slots))
    q, k = (np.broadcast_to(x, (batch, x.shape[-1])) for x in (q, k))
    return abs(q[:, :, None] - k[:, None, :])


def finite_differences(
    q: Any, k: Any, v: Any, call: Call, scene: Scene, out_grad: Any, extras: Extras, name: str
) -> np.ndarray:
    """`gradients` of one input by moving each number a little: slow, for tests of this file."""
    inputs = {"q": q, "k": k, "v": v} | {
        f.name: getattr(extras, f.name) for f in dataclasses.fields(extras)
    }
    x = np.asarray(inputs[name], np.float64)
    grad, step = np.zeros_like(x), 1e-6
    for i in np.ndindex(*x.shape):
        values = []
        for sign in (1, -1):
            moved = x.copy()
            moved[i] += sign * step
            now = inputs | {name: moved}
            own = Extras(bias=now["bias"], slopes=now["slopes"], sinks=now["sinks"])
            out = attention(now["q"], now["k"], now["v"], call, scene, own)
            values.append((out * np.asarray(out_grad, np.float64)).sum())
        grad[i] = (values[0] - values[1]) / (2 * step)
    return grad

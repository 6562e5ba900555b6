"""Three Pallas kernels of flash attention: forward, gradients of keys and values, of queries.

B batch, K kv_heads, R rows (queries times group), S keys, H head_dim. One program works on a block
of rows (or keys) and walks over the blocks of the other side. What it walks over comes in tiles
("major"): for a TPU as large as its memory allows, accumulated over the last axis of the grid; for
a GPU all at once, for its programs do not run in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flaxen.attention.flash_grid import NOBODY, PADDED, Tiling, lying, pad, run, specs, standing
from flaxen.attention.flash_tile import (
    HIDDEN,
    Marks,
    Plan,
    distance,
    keys_of,
    product,
    rows_of,
    score_gradients,
    softmax_step,
)


def forward(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, rows: Marks, keys: Marks
) -> tuple[jax.Array, jax.Array]:
    """q: (B, K, R, H), k: (B, K, S, H), v: (B, K, S, Hv)
    -> the result (B, K, R, Hv) in the dtype of q, and the log of the denominator (B, K, R).
    """
    length, width = q.shape[2], v.shape[3]
    tiling = Tiling.of(plan, length, k.shape[2], ("q", "k", "k_major"), k.shape[2])
    q, k, v = pad(q, tiling.bq), pad(k, tiling.major), pad(v, tiling.major)
    args = (q, k, v, standing(rows, tiling.bq, PADDED), lying(keys, tiling.major, NOBODY))
    fixed, walked = specs(plan, tiling, k.shape[2], rows_fixed=True)
    one = (*q.shape[:3], 1)
    top, total, mixed = run(
        functools.partial(_forward, plan=plan, tiling=tiling, blocks=k.shape[2] // tiling.bk),
        plan,
        (*q.shape[:2], q.shape[2] // tiling.bq, k.shape[2] // tiling.major),
        args,
        (
            fixed(q),
            walked(k),
            walked(v),
            jax.tree.map(fixed, args[3]),
            jax.tree.map(walked, args[4]),
        ),
        [one, one, (*q.shape[:3], width)],
        fixed,
    )
    out = (mixed / jnp.where(total > 0, total, 1)).astype(q.dtype)
    lse = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), HIDDEN)
    return out[:, :, :length], lse[:, :, :length, 0]


def backward(
    plan: Plan, q: Any, k: Any, v: Any, rows: Marks, keys: Marks, lse: Any, mean: Any, grad: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Gradients of q, k, v and of the slopes of the rows (K, R); lse, mean: (B, K, R)."""
    dk, dv = _backward_keys(plan, q, k, v, rows, keys, lse, mean, grad)
    dq, slopes = _backward_rows(plan, q, k, v, rows, keys, lse, mean, grad)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), slopes


def _backward_rows(
    plan: Plan, q: Any, k: Any, v: Any, rows: Marks, keys: Marks, lse: Any, mean: Any, grad: Any
) -> tuple[jax.Array, jax.Array | None]:
    length = q.shape[2]
    tiling = Tiling.of(plan, length, k.shape[2], ("q_dq", "k_dq", "k_major_dq"), k.shape[2])
    q, grad, lse, mean = (pad(x, tiling.bq) for x in (q, grad, lse[..., None], mean[..., None]))
    k, v = pad(k, tiling.major), pad(v, tiling.major)
    marks = standing(rows, tiling.bq, PADDED), lying(keys, tiling.major, NOBODY)
    fixed, walked = specs(plan, tiling, k.shape[2], rows_fixed=True)
    dq, *slopes = run(
        functools.partial(_rows_kernel, plan=plan, tiling=tiling, blocks=k.shape[2] // tiling.bk),
        plan,
        (*q.shape[:2], q.shape[2] // tiling.bq, k.shape[2] // tiling.major),
        (q, k, v, grad, lse, mean, *marks),
        (
            fixed(q), walked(k), walked(v), fixed(grad), fixed(lse), fixed(mean),
            jax.tree.map(fixed, marks[0]), jax.tree.map(walked, marks[1]),
        ),
        [q.shape] + ([lse.shape] if rows.slopes is not None else []),
        fixed,
    )  # fmt: skip
    return dq[:, :, :length], slopes[0][:, :, :length, 0].sum(0) if slopes else None


def _backward_keys(
    plan: Plan, q: Any, k: Any, v: Any, rows: Marks, keys: Marks, lse: Any, mean: Any, grad: Any
) -> tuple[jax.Array, jax.Array]:
    length = k.shape[2]
    tiling = Tiling.of(plan, q.shape[2], length, ("q_dkv", "k_dkv", "q_major_dkv"), q.shape[2])
    q, grad = pad(q, tiling.major), pad(grad, tiling.major)
    lse, mean = (pad(x, tiling.major, 2)[:, :, None] for x in (lse, mean))
    k, v = pad(k, tiling.bk), pad(v, tiling.bk)
    marks = lying(rows, tiling.major, PADDED), standing(keys, tiling.bk, NOBODY)
    fixed, walked = specs(plan, tiling, q.shape[2], rows_fixed=False)
    dk, dv = run(
        functools.partial(_keys_kernel, plan=plan, tiling=tiling, blocks=q.shape[2] // tiling.bq),
        plan,
        (*q.shape[:2], k.shape[2] // tiling.bk, q.shape[2] // tiling.major),
        (q, k, v, grad, lse, mean, *marks),
        (
            walked(q), fixed(k), fixed(v), walked(grad), walked(lse), walked(mean),
            jax.tree.map(walked, marks[0]), jax.tree.map(fixed, marks[1]),
        ),
        [k.shape, v.shape],
        fixed,
    )  # fmt: skip
    return dk[:, :, :length], dv[:, :, :length]


def _forward(
    q: Any, k: Any, v: Any, rows: Marks, keys: Marks, *outs: Any, plan: Plan, tiling: Tiling,
    blocks: int,
) -> None:  # fmt: skip
    bq, bk = tiling.bq, tiling.bk
    q, rows = q[...], _read(rows)

    def step(j: Any, now: Any) -> Any:
        at = pl.ds(j * bk, bk)
        return softmax_step(plan, now, q, k[at, :], v[at, :], rows, _part(keys, at))

    bounds = keys_of(plan, pl.program_id(2), bq, bk, blocks)
    fresh = tuple(
        jnp.full(x.shape, start) for x, start in zip(outs, (HIDDEN, 0.0, 0.0), strict=True)
    )
    _walk(bounds, blocks, tiling.major // bk, step, fresh, outs)


def _rows_kernel(
    q: Any, k: Any, v: Any, grad: Any, lse: Any, mean: Any, rows: Marks, keys: Marks, *outs: Any,
    plan: Plan, tiling: Tiling, blocks: int,
) -> None:  # fmt: skip
    bq, bk = tiling.bq, tiling.bk
    q, grad, lse, mean, rows = q[...], grad[...], lse[...], mean[...], _read(rows)

    def step(j: Any, now: Any) -> Any:
        at = pl.ds(j * bk, bk)
        ks, marks = k[at, :], _part(keys, at)
        _, inner, full = score_gradients(plan, q, ks, v[at, :], grad, lse, mean, rows, marks)
        more = [now[0] + product(inner.astype(ks.dtype), ks)]
        if rows.slopes is not None:
            more.append(now[1] - jnp.sum(full * distance(rows, marks), axis=1, keepdims=True))
        return tuple(more)

    bounds = keys_of(plan, pl.program_id(2), bq, bk, blocks)
    _walk(bounds, blocks, tiling.major // bk, step, tuple(jnp.zeros(x.shape) for x in outs), outs)


def _keys_kernel(
    q: Any, k: Any, v: Any, grad: Any, lse: Any, mean: Any, rows: Marks, keys: Marks, *outs: Any,
    plan: Plan, tiling: Tiling, blocks: int,
) -> None:  # fmt: skip
    bq, bk = tiling.bq, tiling.bk
    k, v, keys = k[...], v[...], _read(keys)

    def step(i: Any, now: Any) -> Any:
        at = pl.ds(i * bq, bq)
        qs, gs = q[at, :], grad[at, :]
        p, inner, _ = score_gradients(
            plan, qs, k, v, gs, lse[:, at], mean[:, at], _part(rows, at), keys, flip=True
        )
        return now[0] + product(inner.astype(qs.dtype), qs), now[1] + product(
            p.astype(gs.dtype), gs
        )

    bounds = rows_of(plan, pl.program_id(2), bq, bk, blocks)
    _walk(bounds, blocks, tiling.major // bq, step, tuple(jnp.zeros(x.shape) for x in outs), outs)


def _walk(
    bounds: tuple[Any, Any], blocks: int, each: int, step: Callable[[Any, Any], Any], fresh: Any,
    outs: Any,
) -> None:  # fmt: skip
    """`step` over those blocks of this tile that lie within bounds; results add up in `outs`."""
    tile = pl.program_id(3)
    if blocks > each:
        fresh = tuple(jnp.where(tile == 0, x, out[...]) for x, out in zip(fresh, outs, strict=True))
    low, high = (jax.lax.clamp(0, x - tile * each, each) for x in bounds)
    for out, x in zip(outs, jax.lax.fori_loop(low, high, step, fresh), strict=True):
        out[...] = x


def _read(marks: Marks) -> Marks:
    return jax.tree.map(lambda x: x[...], marks)


def _part(marks: Marks, at: Any) -> Marks:
    return jax.tree.map(lambda x: x[:, at], marks)

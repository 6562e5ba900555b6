"""Our own flash attention: one kernel, compiled for TPU and GPU and interpreted on CPU.

B batch, T queries, S keys, N heads, K kv_heads, G group, H head_dim. Query heads become rows beside
the queries, (B, K, T*G, H), so that keys are read once for all heads that share them. Slots of
queries and keys go into the kernel, so any scene works: packed rows, caches, lengths that differ.
Source: Dao, FlashAttention-2 (2023).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import blockwise, flash_grid, flash_kernels
from flaxen.attention.call import NOTHING, Call, Extras, Scene, without_unseen
from flaxen.attention.choose import Mechanism, register
from flaxen.attention.flash_tile import Marks, Plan
from flaxen.attention.shards import per_shard
from flaxen.core.platform import platform


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    return per_shard(kernel, q, k, v, call, scene, extras)


def kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    """On one device. `backward="xla"` computes the gradients block by block in plain products."""
    if call.settings.backward == "xla":
        return _recomputing(call, q, k, v, scene, extras)
    return _kernel(q, k, v, call, scene, extras)


def _kernel(q: Any, k: Any, v: Any, call: Call, scene: Scene, extras: Extras) -> jax.Array:
    B, T, N, H = q.shape
    K, G = k.shape[2], N // k.shape[2]
    k, v = without_unseen(k, v, call.mask, scene)
    rows = q.reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    slopes = extras.slopes
    if slopes is not None:
        slopes = jnp.tile(slopes.astype(jnp.float32).reshape(K, G), (1, T))[None]
    plan = Plan(
        call.mask, call.scale, call.softcap, G, call.aligned, call.settings.blocks, platform()
    )
    q_marks, k_marks = _marks(call, scene, G)
    # Whole lanes would be no use to a GPU, whose blocks are powers of two.
    rows, ks, vs = (_wide(x, plan) for x in (rows, k.swapaxes(1, 2), v.swapaxes(1, 2)))
    found: Any = _flash(plan, rows, ks, vs, slopes, q_marks, k_marks)
    out, lse = found
    if extras.sinks is not None:
        sinks = jnp.tile(extras.sinks.astype(lse.dtype).reshape(K, G), (1, T))
        out = out * jax.nn.sigmoid(lse - sinks)[..., None].astype(out.dtype)
    out = out[..., : v.shape[3]].reshape(B, K, T, G, -1).transpose(0, 2, 1, 3, 4)
    return out.reshape(B, T, N, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(
    plan: Plan, q: Any, k: Any, v: Any, slopes: Any, rows: Marks, keys: Marks
) -> tuple[jax.Array, jax.Array]:
    return flash_kernels.forward(plan, q, k, v, rows._replace(slopes=slopes), keys)


def _flash_fwd(plan: Plan, q: Any, k: Any, v: Any, slopes: Any, rows: Marks, keys: Marks) -> Any:
    out, lse = flash_kernels.forward(plan, q, k, v, rows._replace(slopes=slopes), keys)
    return (out, lse), (q, k, v, slopes, rows, keys, out, lse)


def _flash_bwd(plan: Plan, kept: Any, grads: Any) -> Any:
    q, k, v, slopes, rows, keys, out, lse = kept
    grad, lse_grad = grads
    mean = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=-1) - lse_grad
    marks = rows._replace(slopes=slopes)
    dq, dk, dv, ds = flash_kernels.backward(plan, q, k, v, marks, keys, lse, mean, grad)
    return dq, dk, dv, None if ds is None else ds[None], None, None


_flash.defvjp(_flash_fwd, _flash_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recomputing(call: Call, q: Any, k: Any, v: Any, scene: Scene, extras: Extras) -> jax.Array:
    return _kernel(q, k, v, call, scene, extras)


def _recomputing_fwd(call: Call, q: Any, k: Any, v: Any, scene: Scene, extras: Extras) -> Any:
    return _kernel(q, k, v, call, scene, extras), (q, k, v, scene, extras)


def _recomputing_bwd(call: Call, kept: Any, grad: jax.Array) -> Any:
    q, k, v, scene, extras = kept
    again = lambda q, k, v, extras: blockwise.local(q, k, v, call, scene, extras)
    dq, dk, dv, more = jax.vjp(again, q, k, v, extras)[1](grad)
    return dq, dk, dv, None, more


_recomputing.defvjp(_recomputing_fwd, _recomputing_bwd)


def _marks(call: Call, scene: Scene, group: int) -> tuple[Marks, Marks]:
    """Of rows (B or 1, T*G) and of keys (B or 1, S)."""
    many = lambda x: jnp.repeat(x, group, axis=-1)
    batched = lambda x: (x if x.ndim == 2 else x[None]).astype(jnp.int32)
    q, k = batched(scene.q_slots), batched(scene.k_slots)
    q_ids, k_ids = flash_grid.segment_ids(scene, 1, q.shape[1], k.shape[1])
    chunk, reach = call.mask.chunk, None
    if call.mask.prefix and scene.prefix is not None:
        reach = many(jnp.where(q < scene.prefix[:, None], scene.prefix[:, None], 0))
    pieces = lambda x: x // chunk if chunk else None
    return (
        Marks(many(q), many(q_ids), pieces(many(q)), reach),
        Marks(k, k_ids, pieces(k)),
    )


def _wide(x: jax.Array, plan: Plan) -> jax.Array:
    """Zeros up to the channels that the platform works on."""
    size = flash_grid.power(max(x.shape[3], 16)) if plan.platform == "gpu" else x.shape[3]
    return flash_grid.pad(x, size, 3)


def refuse(call: Call) -> str | None:
    if call.bias or call.dropout:
        return "it has no bias and no dropout"
    return "it adds up in float32, and this is float64" if call.dtype == "float64" else None


def prefer(call: Call) -> int:
    # One query reads the whole cache whatever the kernel, and plain products do so at full speed.
    return 2 if call.platform == "tpu" and call.queries > 1 else 0


register(Mechanism("pallas_flash", attend, refuse, prefer))

"""Flash attention by the kernel that jax ships for the hardware, where that can do what is asked.

B batch, T queries, S keys, N heads, K kv_heads, H head_dim. What a shipped kernel cannot do goes to
our own (`pallas_flash`); what that cannot do either (bias, dropout, float64), and all calls on a
CPU, to the same computation in plain products (`blockwise`).
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import blockwise, pallas_flash
from flaxen.attention.call import NOTHING, Call, Extras, Scene, visible, without_unseen
from flaxen.attention.choose import Mechanism, register
from flaxen.attention.flash_grid import NOBODY, pad, power, segment_ids
from flaxen.attention.shards import per_shard
from flaxen.core.platform import platform

LANES = 128


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    return per_shard(_here, q, k, v, call, scene, extras)


def _here(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    where = platform()
    if where not in ("tpu", "gpu"):
        # Plain products, for an interpreted kernel takes many times as long.
        if call.settings.backward != "xla":
            _say_once(where)
        return blockwise.local(q, k, v, call, scene, extras)
    if where == "tpu" and shipped_for_tpu(call):
        return _tpu(q, k, v, call, scene, extras)
    if where == "gpu" and shipped_for_gpu(call):
        return _gpu(q, k, v, call, scene)
    ours = blockwise.local if pallas_flash.refuse(call) else pallas_flash.kernel
    return ours(q, k, v, call, scene, extras)


@functools.cache
def _say_once(where: str) -> None:
    logging.getLogger(__name__).warning(
        "There is no flash attention kernel for %s: its backward pass is XLA's, with the same "
        "gradients. Choose backward='xla' to say so yourself.",
        where,
    )


def shipped_for_tpu(call: Call) -> bool:
    """Whether `jax.experimental.pallas.ops.tpu.flash_attention` can take the call."""
    return _plain(call) and (call.head_dim <= LANES or call.head_dim % LANES == 0)


def shipped_for_gpu(call: Call) -> bool:
    """Whether `jax.experimental.pallas.ops.gpu.attention` can: its segments are those of queries
    and keys at once, so it cannot hide a key whose own query sees others.
    """
    same = call.queries == call.keys and (call.aligned or not call.packed)
    return _plain(call) and same and not (call.padded or call.bias)


def _plain(call: Call) -> bool:
    mask = call.mask
    odd = mask.window or mask.chunk or mask.prefix or call.softcap or call.sinks or call.alibi
    known = call.aligned or not mask.causal
    kernels = call.settings.backward != "xla" and not call.dropout and call.dtype != "float64"
    return kernels and known and not odd and call.head_dim == call.v_head_dim


def _tpu(q: Any, k: Any, v: Any, call: Call, scene: Scene, extras: Extras) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import flash_attention as kernel

    B, T, N, _ = q.shape
    S = k.shape[1]
    k, v = without_unseen(k, v, call.mask, scene)
    # The kernel adds biases before it scales.
    q = (q.astype(jnp.float32) * call.scale).astype(q.dtype)
    sizes = _sizes(call, T, S) | {"block_b": math.gcd(call.settings.blocks.b, B)}
    tq, tk = sizes["block_q_major_dkv"], sizes["block_k_major"]
    major = [jnp.swapaxes(pad(_heads(x, N), n, 1), 1, 2) for x, n in ((q, tq), (k, tk), (v, tk))]
    bias = extras.bias
    if bias is not None:
        whole: Any = jnp.broadcast_to(bias, (B, N, T, S)).astype(jnp.float32)
        bias = pad(pad(whole, tq, 2), tk, 3)
    ids = None
    if scene.keep is not None or scene.q_segments is not None or not call.mask.causal:
        mine, theirs = segment_ids(scene, B, T, S)
        ids = kernel.SegmentIds(pad(mine, tq, 1), pad(theirs, tk, 1, NOBODY))
    out: Any = kernel.flash_attention(
        *major,
        ab=bias,
        segment_ids=ids,
        causal=call.mask.causal,
        block_sizes=kernel.BlockSizes(**sizes),
    )
    out = jnp.swapaxes(out, 1, 2)[:, :T]
    if ids is None:
        return out
    return jnp.where(visible(call.mask, scene).any(axis=-1)[:, :, None, None], out, 0)


def _sizes(call: Call, queries: int, keys: int) -> dict[str, int]:
    """Block sizes under the kernel's names: whole lanes, each dividing the next larger one."""
    whole = lambda name, length: -(-min(call.settings.blocks.get(name), length) // LANES) * LANES
    size = lambda name: whole(name, queries if name[0] == "q" else keys)
    k, q = size("k"), size("q")
    up = lambda name, inner: -(-size(name) // inner) * inner
    major = up("k_major", k)
    return {
        "block_q": q, "block_k": k, "block_k_major": major,
        "block_q_major_dkv": up("q_major_dkv", q), "block_q_dkv": q,
        "block_k_major_dkv": major, "block_k_dkv": k,
        "block_q_dq": q, "block_k_major_dq": major, "block_k_dq": k,
    }  # fmt: skip


def _gpu(q: Any, k: Any, v: Any, call: Call, scene: Scene) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import attention as kernel

    B, T, N, H = q.shape
    blocks = call.settings.blocks
    fit = lambda name: max(16, power(min(blocks.get(name), T)))
    rows, inner = max(fit("q"), fit("k")), min(fit("q_dkv"), fit("k_dkv"), 32)
    sizes = kernel.BlockSizes(fit("q"), fit("k"), inner, inner, inner, inner)
    q, k, v = (pad(pad(_heads(x, N), rows, 1), power(H), 3) for x in (q, k, v))
    ids = None
    if scene.q_segments is not None or (q.shape[1] != T and not call.mask.causal):
        ids = pad(segment_ids(scene, B, T, T)[0], rows, 1, NOBODY)
    out: Any = kernel.mha(
        q, k, v, ids, sm_scale=call.scale, causal=call.mask.causal, block_sizes=sizes
    )
    return out[:, :T, :, :H]


def _heads(x: jax.Array, heads: int) -> jax.Array:
    """Key heads once for each query head: the shipped kernels have as many of both."""
    return jnp.repeat(x, heads // x.shape[2], axis=2)


def prefer(call: Call) -> int:
    return 3 if call.platform == "tpu" and shipped_for_tpu(call) else 0


register(Mechanism("flash", attend, refuse=lambda call: None, prefer=prefer))

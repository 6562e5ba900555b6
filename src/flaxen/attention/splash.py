"""The splash attention kernel of jax for TPUs, which skips the blocks that a mask hides.

B batch, T queries, S keys, N heads, K kv_heads, H head_dim. Its masks are known when it is
compiled; where positions are known only as it runs (a query to a cache, a sequence cut over
devices), on GPUs, and where JAX counts in 64 bits, our own kernel takes the call. On a CPU it is
interpreted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import pallas_flash
from flaxen.attention.call import NOTHING, Call, Extras, Mask, Scene, without_unseen
from flaxen.attention.choose import Mechanism, register
from flaxen.attention.flash_grid import NOBODY, pad, segment_ids
from flaxen.attention.settings import Blocks
from flaxen.attention.shards import per_shard
from flaxen.core.platform import platform

LANES = 128
SILENT = -1e30
"""A sink that takes no weight from any key, and leaves zeros to a row that sees none."""


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    return per_shard(_here, q, k, v, call, scene, extras)


def _here(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    wide = jax.config.read("jax_enable_x64")
    if platform() == "gpu" or wide or not static(call):
        return pallas_flash.kernel(q, k, v, call, scene, extras)
    k, v = without_unseen(k, v, call.mask, scene)
    T, N, S = *q.shape[1:3], k.shape[1]
    tq, tk = tiles(call.settings.blocks, T, S)
    # The kernel does not scale.
    q = (q.astype(jnp.float32) * call.scale).astype(q.dtype)
    q, k, v = (jnp.swapaxes(pad(x, n, 1), 1, 2) for x, n in ((q, tq), (k, tk), (v, tk)))
    kernel = _kernel(
        call.mask, T, S, N, call.softcap, call.settings.blocks, interpret=platform() != "tpu"
    )
    ids = _ids(call, scene, q.shape, k.shape)
    sinks = jnp.full(N, SILENT) if extras.sinks is None else extras.sinks.astype(jnp.float32)
    out = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(q, k, v, ids, sinks)
    return jnp.swapaxes(out, 1, 2)[:, :T]


def static(call: Call) -> bool:
    """Whether what a query sees, hidden keys aside, is known when the kernel is compiled."""
    mask = call.mask
    if call.alibi or mask.prefix or (mask.chunk and call.packed):
        return False
    return call.aligned or not (mask.causal or mask.window or mask.chunk)


def tiles(blocks: Blocks, queries: int, keys: int) -> tuple[int, int]:
    """What the lengths of queries and of keys are padded to a multiple of."""
    sizes = _sizes(blocks, queries, keys)
    return (
        math.lcm(sizes["block_q"], sizes["block_q_dkv"], sizes["block_q_dq"]),
        math.lcm(sizes["block_kv"], sizes["block_kv_dkv"], sizes["block_kv_dq"]),
    )


def _sizes(blocks: Blocks, queries: int, keys: int) -> dict[str, Any]:
    """Block sizes under the kernel's names: whole lanes, and no longer than the sequence."""
    whole = lambda n: -(-n // LANES) * LANES
    q = lambda name: whole(min(blocks.get(name), queries))
    k = lambda name: whole(min(blocks.get(name), keys))
    major = lambda name, inner: -(-k(name) // k(inner)) * k(inner)
    return {
        "block_q": q("q"),
        "block_kv": major("k_major", "k"),
        "block_kv_compute": k("k"),
        "block_q_dkv": q("q_dkv"),
        "block_kv_dkv": major("k_major_dkv", "k_dkv"),
        "block_kv_dkv_compute": k("k_dkv"),
        "block_q_dq": q("q_dq"),
        "block_kv_dq": k("k_dq"),
    }


@functools.lru_cache(maxsize=64)
def _kernel(
    mask: Mask, queries: int, keys: int, heads: int, softcap: float | None, blocks: Blocks,
    interpret: bool,
) -> Any:  # fmt: skip
    """Which blocks a mask needs is worked out once for each kind of call."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    tq, tk = tiles(blocks, queries, keys)
    shape = (-(-queries // tq) * tq, -(-keys // tk) * tk)
    if mask.window or mask.chunk:
        # A chunk is no longer than it is; where it begins, segments tell.
        back = min(mask.window - mask.causal if mask.window else keys, (mask.chunk or keys) - 1)
        ahead = 0 if mask.causal else min(mask.window or keys, (mask.chunk or keys) - 1)
        seen: Any = masks.LocalMask(shape, (back, ahead), offset=0)
    else:
        seen = masks.CausalMask(shape) if mask.causal else masks.FullMask(shape)
    with jax.ensure_compile_time_eval():
        return kernel.make_splash_mha(
            masks.MultiHeadMask([seen] * heads),
            block_sizes=kernel.BlockSizes(**_sizes(blocks, queries, keys)),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=softcap,
            interpret=interpret,
        )


def _ids(call: Call, scene: Scene, q: tuple[int, ...], k: tuple[int, ...]) -> Any:
    """Segments (B, T) and (B, S) in which padding and hidden keys have one of their own, or None
    where the mask alone hides all that is hidden. q, k: shapes (B, heads, length, H) as padded.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    keys, chunk = scene.k_slots.shape[-1], call.mask.chunk
    hides = scene.keep is not None or scene.q_segments is not None or chunk
    if not hides and (call.mask.causal or keys == k[2]):
        return None
    if chunk:
        pieces = lambda x: jnp.broadcast_to(x // chunk, (q[0], x.shape[-1]))
        mine, theirs = pieces(scene.q_slots), pieces(scene.k_slots)
        scene = dataclasses.replace(scene, q_segments=mine, k_segments=theirs)
    mine, theirs = segment_ids(scene, q[0], call.queries, keys)
    return kernel.SegmentIds(pad(mine, q[2], 1), pad(theirs, k[2], 1, NOBODY))


register(
    Mechanism(
        "splash",
        attend,
        refuse=pallas_flash.refuse,
        prefer=lambda call: 4 if call.platform == "tpu" and static(call) else 0,
    )
)

"""The flash attention of cuDNN, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import sdpa
from flaxen.attention.call import NOTHING, Call, Extras, Scene, visible, without_unseen
from flaxen.attention.choose import Mechanism, register
from flaxen.attention.online import score_bias
from flaxen.attention.shards import per_shard


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    """Each device works on its own rows, heads and queries."""
    return per_shard(local, q, k, v, call, scene, extras)


def local(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    """The same on one device. Causal calls and windows are named to the kernel, which then skips
    what is hidden; every other mask is spelled out.
    """
    bias = score_bias(scene, extras)
    bias = None if bias is None else bias.astype(q.dtype)
    named = _named(call, scene)
    if named is not None:
        return jax.nn.dot_product_attention(
            q, k, v, bias, scale=call.scale, implementation="cudnn", **named
        )
    see = visible(call.mask, scene)
    k, v = without_unseen(k, v, call.mask, scene)
    y = jax.nn.dot_product_attention(
        q, k, v, bias, see[:, None], scale=call.scale, implementation="cudnn"
    )
    return jnp.where(see.any(axis=-1)[:, :, None, None], y, 0)


def _named(call: Call, scene: Scene) -> dict[str, Any] | None:
    """The arguments that say the whole mask, or None where only an array can."""
    hides = scene.keep is not None or scene.q_segments is not None
    mask = call.mask
    if hides or mask.chunk or mask.prefix:
        return None
    if not mask.causal:
        return None if mask.window else {}
    if not scene.aligned:
        return None
    window = {"local_window_size": (mask.window - 1, 0)} if mask.window else {}
    return {"is_causal": True, **window}


def absent(platform: str) -> str | None:
    return None if platform == "gpu" else f"it runs on NVIDIA GPUs, and this is {platform}"


def refuse(call: Call) -> str | None:
    """What the kernel does not have, and where it does not run."""
    if reason := absent(call.platform):
        return reason
    if call.dtype not in ("float16", "bfloat16"):
        return f"it takes float16 and bfloat16, and this is {call.dtype}"
    if call.head_dim % 8 or call.head_dim > _widest():
        return f"head_dim is {call.head_dim}, not a multiple of 8 up to {_widest()}"
    spelled = call.padded or call.packed or call.bias or call.alibi or not call.aligned
    if spelled and call.queries > 1 and (call.queries % 2 or call.keys % 2):
        return f"with a mask or bias lengths must be even, not {call.queries} and {call.keys}"
    return sdpa.refuse(call)


def _widest() -> int:
    """Channels of a head: 256 from Hopper on, 128 before."""
    if jax.default_backend() != "gpu":
        return 256
    major = str(getattr(jax.devices()[0], "compute_capability", "9.0")).split(".")[0]
    return 256 if int(major) >= 9 else 128


register(Mechanism("cudnn", attend, refuse, prefer=lambda call: 6, absent=absent))

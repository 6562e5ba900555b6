"""The attention of the tokamax package, which picks a kernel for the hardware by itself.

B batch, T queries, S keys.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention.call import NOTHING, Call, Extras, Scene, visible, without_unseen
from flaxen.attention.choose import Mechanism, register
from flaxen.attention.shards import per_shard


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    return per_shard(_here, q, k, v, call, scene, extras)


def _here(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    # Its name is this file's too: an import statement would tell readers of types the wrong one.
    tokamax: Any = importlib.import_module("tokamax")

    if plain(call, scene):
        # Kernels skip what they know to be hidden, which an array of bools does not tell them.
        return tokamax.dot_product_attention(
            q, k, v, scale=call.scale, is_causal=call.mask.causal, logits_soft_cap=call.softcap
        )
    see = visible(call.mask, scene)
    k, v = without_unseen(k, v, call.mask, scene)
    y = tokamax.dot_product_attention(
        q, k, v, mask=see[:, None], scale=call.scale, logits_soft_cap=call.softcap
    )
    return jnp.where(see.any(axis=-1)[:, :, None, None], y, 0)


def plain(call: Call, scene: Scene) -> bool:
    """A sequence to itself with nothing hidden but what comes later."""
    mask = call.mask
    hides = scene.keep is not None or scene.q_segments is not None
    return call.aligned and not (mask.window or mask.chunk or mask.prefix or hides)


def absent(platform: str) -> str | None:
    found = importlib.util.find_spec("tokamax")
    return None if found else "tokamax is not installed: pip install tokamax"


def refuse(call: Call) -> str | None:
    if reason := absent(call.platform):
        return reason
    if call.sinks or call.bias or call.alibi or call.dropout:
        return "it has no bias, sinks or dropout"
    return None


register(Mechanism("tokamax", attend, refuse, prefer=lambda call: 0, absent=absent))

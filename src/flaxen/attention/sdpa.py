"""`jax.nn.dot_product_attention`: the compiler's own products and softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

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
    """The same on one device."""
    see = visible(call.mask, scene)
    k, v = without_unseen(k, v, call.mask, scene)
    bias = score_bias(scene, extras)
    y = jax.nn.dot_product_attention(
        q, k, v, bias, see[:, None], scale=call.scale, implementation="xla"
    )
    return jnp.where(see.any(axis=-1)[:, :, None, None], y, 0)


def refuse(call: Call) -> str | None:
    """What `jax.nn.dot_product_attention` does not have."""
    if call.softcap:
        return "it has no softcap"
    if call.sinks:
        return "it has no sinks"
    if call.dropout:
        return "it has no dropout"
    if call.v_head_dim != call.head_dim:
        return f"values have {call.v_head_dim} channels and keys {call.head_dim}"
    if call.dtype == "float16" and call.platform != "gpu":
        return f"JAX has no float16 products that add up in float32 on {call.platform}"
    return None


register(Mechanism("sdpa", attend, refuse, prefer=lambda call: 3 if call.platform == "gpu" else 0))

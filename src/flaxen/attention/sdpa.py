"""`jax.nn.dot_product_attention`: the compiler's own choice of kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flaxen.attention.call import NOTHING, Call, Extras, Scene, visible
from flaxen.attention.choose import Mechanism, register


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene, extras: Extras = NOTHING, /
) -> jax.Array:
    see = visible(call.mask, scene)
    v = jnp.where(see.any(axis=1)[:, :, None, None], v, 0)
    y = jax.nn.dot_product_attention(q, k, v, mask=see[:, None], scale=call.scale)
    return jnp.where(see.any(axis=-1)[:, :, None, None], y, 0)


def refuse(call: Call) -> str | None:
    if call.softcap:
        return "it has no softcap"
    if call.sinks or call.bias or call.alibi or call.dropout:
        return "it has no bias, sinks or dropout"
    if call.v_head_dim != call.head_dim:
        return f"values have {call.v_head_dim} channels and keys {call.head_dim}"
    return None


register(Mechanism("sdpa", attend, refuse, prefer=lambda call: 2 if call.platform == "gpu" else 0))

"""`jax.nn.dot_product_attention`: the compiler's own choice of kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from flaxen.attention.call import Call, Scene, visible
from flaxen.attention.choose import Mechanism, register


def attend(q: jax.Array, k: jax.Array, v: jax.Array, call: Call, scene: Scene) -> jax.Array:
    see = visible(call.mask, scene)
    v = jnp.where(see.any(axis=1)[:, :, None, None], v, 0)
    y = jax.nn.dot_product_attention(q, k, v, mask=see[:, None], scale=call.scale)
    return jnp.where(see.any(axis=-1)[:, :, None, None], y, 0)


def refuse(call: Call) -> str | None:
    if call.softcap:
        return "it has no softcap"
    return None


register(Mechanism("sdpa", attend, refuse, prefer=lambda call: 2 if call.platform == "gpu" else 0))

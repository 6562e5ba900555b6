"""From the states of patches to one vector for each picture: x (B, T, D) -> (B, D)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.dot import dot
from flaxen.core.tree import module, param, zeros_param
from flaxen.layers.context import Context
from flaxen.layers.linear import Linear, linear
from flaxen.layers.norm import Identity


@module
class FirstPatch:
    """What stands first, normed: CLIP's class token."""

    norm: Any = Identity()

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        return self.norm(x[:, 0])


@module
class ProbeAttention:
    """One query looks at all states. in_proj_weight: (parts, heads, head_dim, embed) and
    in_proj_bias without embed: of query, keys and values.
    """

    in_proj_weight: Any
    in_proj_bias: Any
    out_proj: Linear

    def __call__(self, probe: jax.Array, x: jax.Array) -> jax.Array:
        """probe (D,) and x (B, T, D) -> (B, D)."""
        q, k, v = (self._projected(i, y) for i, y in enumerate((probe, x, x)))
        scale = q.shape[-1] ** -0.5
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scores = jnp.einsum("NH,BTNH->BNT", q, k, preferred_element_type=wide) * scale
        weights = jax.nn.softmax(scores, -1).astype(v.dtype)
        return self.out_proj(jnp.einsum("BNT,BTNH->BNH", weights, v))

    def _projected(self, part: int, x: jax.Array) -> jax.Array:
        return dot(x, self.in_proj_weight[part]) + self.in_proj_bias[part].astype(x.dtype)


@module
class ProbePooler:
    """SigLIP's: a learned query `probe` (D,), then x + mlp(layernorm(x))."""

    probe: Any
    attention: ProbeAttention
    layernorm: Any
    mlp: Any

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        y = self.attention(self.probe.astype(x.dtype), x)
        return y + self.mlp(self.layernorm(y), ctx)


def probe_pooler(embed: int, heads: int, layernorm: Any, mlp: Any) -> ProbePooler:
    sizes = {"parts": 3, "heads": heads, "head_dim": embed // heads}
    attention = ProbeAttention(
        in_proj_weight=param("(parts heads head_dim) embed", **sizes, embed=embed),
        in_proj_bias=zeros_param("(parts heads head_dim)", **sizes),
        out_proj=linear(
            {k: n for k, n in sizes.items() if k != "parts"}, {"embed": embed}, bias=True
        ),
    )
    probe = param("1 1 embed", embed=embed)
    return ProbePooler(probe=probe, attention=attention, layernorm=layernorm, mlp=mlp)

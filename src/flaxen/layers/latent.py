"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are
made of one small vector a token, and that is all that is remembered, beside one rotated key.

Letters: R rank, P channels of a key that do not turn, H channels that do.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import Mask
from flaxen.cache import Latent, Order, latents
from flaxen.core.tree import module, static
from flaxen.layers.attention import Attends, rotated
from flaxen.layers.context import Context
from flaxen.layers.linear import Linear
from flaxen.layers.rope import Rope


@module
class Compressed:
    """Queries by way of a vector of few channels."""

    q_a_proj: Linear
    q_a_layernorm: Any
    q_b_proj: Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (B, T, D) -> (B, T, N, P + H)."""
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


@module
class LatentAttention(Attends):
    """q_proj: a `Linear` or `Compressed`; kv_a_proj: D -> R; k_rope_proj: D -> H, for all heads;
    k_b_proj and v_b_proj: R -> the keys and values of each head.
    """

    q_proj: Any
    kv_a_proj: Linear
    k_rope_proj: Linear
    kv_a_layernorm: Any
    k_b_proj: Linear
    v_b_proj: Linear
    o_proj: Linear
    rope: static[Rope]
    mask: static[Mask] = Mask()
    scale: static[float]
    dropout: static[float] = 0.0

    def __call__(
        self, x: jax.Array, ctx: Context, cache: Latent | None = None
    ) -> tuple[jax.Array, Latent | None]:
        """x (B, T, D) -> (B, T, D), and the cache with the new tokens in it.

        Queries of new tokens meet a long past as it is stored; it is never expanded to all heads.
        """
        q, latent, key = self.compressed(x, ctx)
        if cache is None or ctx.at is None:
            return self.o_proj(self.attend(*self.expanded(q, latent, key, ctx), ctx)), cache
        cache, latent, key = cache.remember(latent, key, ctx.at, ctx.scene)
        if ctx.scene.aligned or not self._plain():
            y = self.attend(*self.expanded(q, latent, key, ctx), ctx)
        else:
            y = self.absorbed(q, latent, key, ctx)
        return self.o_proj(y), cache

    def compressed(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries (B, T, N, P + H), and what is remembered: (B, T, R) and (B, T, H)."""
        q = ctx.runtime.constrain(self.q_proj(x), "batch", "seq", "heads", "head_dim")
        keep, turn = jnp.split(q, [q.shape[-1] - self.rope.dim], -1)
        q = jnp.concatenate([keep, rotated(turn, ctx, self.rope)], -1)
        key = rotated(self.k_rope_proj(x)[:, :, None], ctx, self.rope)[:, :, 0]
        return q, self.kv_a_layernorm(self.kv_a_proj(x)), key

    def expanded(
        self, q: jax.Array, latent: jax.Array, key: jax.Array, ctx: Context
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, and keys and values of every head, (B, S, N, P + H) and (B, S, N, V)."""
        lay = lambda y: ctx.runtime.constrain(y, "batch", "seq", "heads", "head_dim")
        k, v = lay(self.k_b_proj(latent)), lay(self.v_b_proj(latent))
        shared = jnp.broadcast_to(key[:, :, None], (*k.shape[:-1], key.shape[-1]))
        return q, jnp.concatenate([k, shared], -1), v

    def absorbed(self, q: jax.Array, latent: jax.Array, key: jax.Array, ctx: Context) -> jax.Array:
        """The same with one key head, the stored vectors: `k_b_proj` goes to the queries, and
        `v_b_proj` to the result.
        """
        wide = jnp.promote_types(q.dtype, jnp.float32)
        keep, turned = jnp.split(q, [q.shape[-1] - self.rope.dim], -1)
        w_k, w_v = (p.weight.astype(q.dtype) for p in (self.k_b_proj, self.v_b_proj))
        keep = jnp.einsum("BTNP,NPR->BTNR", keep, w_k, preferred_element_type=wide)
        q = jnp.concatenate([keep.astype(q.dtype), turned], -1)
        k = jnp.concatenate([latent, key], -1)[:, :, None]
        y = self.attend(q, k, latent[:, :, None], ctx)
        y = jnp.einsum("BTNR,NVR->BTNV", y, w_v, preferred_element_type=wide)
        return y.astype(q.dtype)

    def projected(self, x: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.expanded(*self.compressed(x, ctx), ctx)

    def cache(self, order: Order) -> Latent:
        """The shapes of what this layer remembers."""
        rank, head_dim = (p.weight.shape[-2] for p in (self.kv_a_proj, self.k_rope_proj))
        return latents(order, rank, head_dim)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        k, v = self.k_b_proj.weight.shape, self.v_b_proj.weight.shape
        return k[-3], k[-3], k[-2] + self.rope.dim, v[-2]

    @property
    def remembers(self) -> int:
        shapes = (p.weight.shape for p in (self.kv_a_proj, self.k_rope_proj))
        return sum(int(np.prod(shape[:-1])) for shape in shapes)

    def _plain(self) -> bool:
        """Whether both matrices are arrays; a leaf type can only be multiplied from one side."""
        weights = self.k_b_proj.weight, self.v_b_proj.weight
        return all(isinstance(w, jax.Array | np.ndarray) for w in weights)

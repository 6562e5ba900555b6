"""A slot for each token, the same for all rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import Scene
from flaxen.cache.codec import Codec, width
from flaxen.cache.layout import KeysValues, Layout, NewTokens, cut_keys, put
from flaxen.core.tree import module, static

AXES = ("batch", "kv_heads", "keys", "head_dim")


@module
class Dense(KeysValues):
    """Keys and values as (B, K, S, H)."""

    def write(self, stored: Any, new: Any, at: NewTokens) -> Any:
        return write_run(stored, new, at, AXES)

    def read(self, at: NewTokens | None, dtype: Any) -> tuple[jax.Array, jax.Array]:
        k, v = (self.codec.decode(x, dtype).swapaxes(1, 2) for x in (self.k, self.v))
        return k, v

    def keys(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values in the dtype that they were made for: (B, S, K, H)."""
        return self.read(None, self.codec.dtype)

    def grown(self, more: int) -> Dense:
        return Dense(k=wider(self.k, more), v=wider(self.v, more), codec=self.codec)


@module
class Latent(Layout):
    """One compressed vector (B, S, R) and one rotated key (B, S, H) a token, which all heads share:
    what multi-head latent attention remembers.
    """

    latent: Any
    rope: Any
    codec: static[Codec]

    @property
    def token(self) -> tuple[int, ...]:
        return (*jax.tree.leaves(self.rope)[0].shape[:-3], width(self.latent), width(self.rope))

    def append(self, latent: jax.Array, rope: jax.Array, at: NewTokens) -> Latent:
        """Store new vectors, (B, T, R) and (B, T, H)."""
        axes = ("batch", "keys", "head_dim")
        return Latent(
            latent=write_run(self.latent, self.codec.encode(latent), at, axes),
            rope=write_run(self.rope, self.codec.encode(rope), at, axes),
            codec=self.codec,
        )

    def remember(
        self, latent: jax.Array, rope: jax.Array, at: NewTokens, scene: Scene
    ) -> tuple[Latent, jax.Array, jax.Array]:
        """Store new vectors; give the cache, and what their queries may look at: always what is
        stored.
        """
        cache = self.append(latent, rope, at)
        if scene.aligned:
            return cache, self.stored(latent), self.stored(rope)
        every, keys = cache.keys()
        return cache, every.astype(latent.dtype), keys.astype(latent.dtype)

    def keys(self) -> tuple[jax.Array, jax.Array]:
        """All vectors, (B, S, R) and (B, S, H)."""
        latent, rope = (self.codec.decode(x, self.codec.dtype) for x in (self.latent, self.rope))
        return latent, rope

    def grown(self, more: int) -> Latent:
        return Latent(
            latent=wider(self.latent, more), rope=wider(self.rope, more), codec=self.codec
        )


def write_run(stored: Any, new: Any, at: NewTokens, axes: tuple[str, ...]) -> Any:
    """Write `new` (B, T, ...) from the next free slot on."""
    axis = axes.index("keys")
    if any(cut_keys(x, axes, at.placement) for x in jax.tree.leaves(stored)):
        places = at.slot + jnp.arange(at.valid.shape[1])
        return put(stored, new, jnp.broadcast_to(places, at.valid.shape), axes, at.placement)

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.moveaxis(new, 1, axis)
        return jax.lax.dynamic_update_slice_in_dim(old, new, at.slot, axis=axis)

    return jax.tree.map(write, stored, new)


def wider(stored: Any, more: int, axis: int = -2) -> Any:
    """With `more` empty places at the end of an axis."""

    def pad(x: jax.Array) -> jax.Array:
        ends = [(0, 0)] * x.ndim
        ends[axis] = (0, more)
        return jnp.pad(x, ends)

    return jax.tree.map(pad, stored)

"""A cache with one slot per token, allocated for what is asked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from flaxen.core.errors import CacheError
from flaxen.core.tree import module


@module
class Dense:
    """Keys and values of one layer, unrepeated and head-major: (B, K, S, H)."""

    k: jax.Array
    v: jax.Array

    def append(self, k: jax.Array, v: jax.Array, at: jax.Array) -> Dense:
        """Write new keys and values, (B, T, K, H), at slot `at` on."""
        write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(
            old, new.swapaxes(1, 2).astype(old.dtype), at, axis=2
        )
        return Dense(k=write(self.k, k), v=write(self.v, v))

    def keys(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values as attention wants them: (B, S, K, H)."""
        return self.k.swapaxes(1, 2), self.v.swapaxes(1, 2)


@module
class Cache:
    """All layers' keys and values, and what all layers share.

    index: the next free slot, the same for every row; keep: (B, S) True where a real token stands;
    lengths: (B,) real tokens so far, the next token's position.
    """

    layers: Any
    index: jax.Array
    keep: jax.Array
    lengths: jax.Array

    @property
    def capacity(self) -> int:
        return self.keep.shape[1]

    def advance(self, valid: jax.Array) -> Cache:
        """Reserve slots for new tokens; valid (B, T) is False for padding."""
        keep = jax.lax.dynamic_update_slice_in_dim(self.keep, valid, self.index, axis=1)
        return Cache(
            layers=self.layers,
            index=self.index + valid.shape[1],
            keep=keep,
            lengths=self.lengths + valid.sum(1, dtype=jnp.int32),
        )

    def grown(self, capacity: int) -> Cache:
        """The same content with room for `capacity` slots."""
        more = capacity - self.capacity
        if more < 0:
            raise CacheError(f"Cannot shrink a cache of {self.capacity} slots to {capacity}.")
        wider = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, more), (0, 0)])
        return Cache(
            layers=jax.tree.map(wider, self.layers),
            index=self.index,
            keep=jnp.pad(self.keep, [(0, 0), (0, more)]),
            lengths=self.lengths,
        )


def fits(cache: Any, wanted: Cache) -> None:
    """Check that a cache has the rows and the shapes of `wanted`, whatever its length.

    Raises:
        CacheError: for another number of rows, another model's cache, or something else.
    """
    if not isinstance(cache, Cache):
        raise CacheError(
            f"{type(cache).__name__} is no cache; expected what init_cache or a call gave back."
        )
    rows, expected = cache.keep.shape[0], wanted.keep.shape[0]
    if rows != expected:
        raise CacheError(
            f"The cache has {rows} rows and the input {expected}; a conversation goes on with the "
            "same rows."
        )

    def shapes(c: Cache) -> Any:
        found = [(*x.shape[:-2], x.shape[-1]) for x in jax.tree.leaves(c.layers)]
        return jax.tree.structure(c.layers), found

    if shapes(cache) != shapes(wanted):
        raise CacheError("The cache was made by a model of another shape; start without one.")


def room_for(cache: Cache, tokens: int) -> None:
    """Check, outside of compiled code, that `tokens` more fit.

    Raises:
        CacheError: naming what is stored, asked and available.
    """
    if isinstance(cache.index, Tracer):
        return
    used = int(cache.index)
    if used + tokens > cache.capacity:
        raise CacheError(
            f"The cache has {cache.capacity} slots, {used} are used and {tokens} more tokens were "
            "given. "
            f"Make a larger one (init_cache(batch, {used + tokens})) or call "
            f"cache.grown({used + tokens})."
        )

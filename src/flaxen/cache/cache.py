"""What a model remembers between calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flaxen.cache.dense import Dense, Latent
from flaxen.cache.layout import Layout, NewTokens
from flaxen.cache.paged import Paged, Pages
from flaxen.cache.ring import Ring
from flaxen.core.errors import CacheError
from flaxen.core.tree import module, walk
from flaxen.shard import Placement


@module
class Cache:
    """All layers' memories, and what they share.

    index: the next free slot, the same for every row; keep: (B, S) True in slots where a real token
    stands; lengths: (B,) real tokens so far, the next token's position; pages: whose they are;
    shift: (B,) how much further that position is, where pictures count otherwise than words do.
    Rings and pages go by `lengths` and need no slots.
    """

    layers: Any
    index: jax.Array
    keep: jax.Array
    lengths: jax.Array
    pages: Pages | None = None
    shift: jax.Array | None = None

    @property
    def next_position(self) -> jax.Array:
        """Where the next token of each row stands, (B,)."""
        return self.lengths if self.shift is None else self.lengths + self.shift

    def shifted(self, further: Any) -> Cache:
        """With the next positions `further` ahead, (B,)."""
        shift = jnp.asarray(further) if self.shift is None else self.shift + further
        return dataclasses.replace(self, shift=shift)

    @property
    def capacity(self) -> int:
        return self.keep.shape[1]

    @property
    def layouts(self) -> list[Layout]:
        """Each layer's memory; equal layers that are stacked count once."""
        return [x for x in walk(self.layers) if isinstance(x, Layout)]

    @property
    def endless(self) -> bool:
        """Whether any number of tokens fits, as no layer keeps them all."""
        return bool(self.layouts) and all(layer.endless for layer in self.layouts)

    def advance(
        self, valid: jax.Array, placement: Placement | None = None
    ) -> tuple[Cache, NewTokens]:
        """Reserve room for new tokens; valid (B, T) is False for padding."""
        slots, lengths = valid.shape[1], self.lengths + valid.sum(1, dtype=jnp.int32)
        keep, pages, room = self.keep, self.pages, None
        if pages is not None:
            pages = pages.allocate(jnp.minimum(lengths, self.capacity))
            room = (pages.enough(lengths) & (lengths <= self.capacity))[:, None, None]
        elif not self.endless:
            room = self.index + slots <= self.capacity
            keep = jax.lax.dynamic_update_slice_in_dim(keep, valid, self.index, axis=1)
        new = NewTokens(
            slot=self.index,
            valid=valid,
            positions=self.lengths[:, None] + jnp.cumsum(valid, 1) - 1,
            lengths=lengths,
            table=None if pages is None else pages.table,
            room=room,
            placement=placement,
        )
        cache = dataclasses.replace(
            self, index=self.index + slots, keep=keep, lengths=lengths, pages=pages
        )
        return cache, new

    def grown(self, capacity: int) -> Cache:
        """The same content with room for `capacity` slots."""
        more = capacity - self.capacity
        if more < 0:
            raise CacheError(f"Cannot shrink a cache of {self.capacity} slots to {capacity}.")
        pages = None if self.pages is None else self.pages.grown(capacity)
        added = more if pages is None or self.pages is None else pages.count - self.pages.count
        return dataclasses.replace(
            self,
            layers=self._each(lambda layer: layer.grown(added)),
            keep=jnp.pad(self.keep, [(0, 0), (0, more)]),
            pages=pages,
        )

    def cropped(self, slots: Any) -> Cache:
        """Only what stands in the first `slots` slots (with pages: tokens), to go on from there.

        Raises:
            CacheError: when a layer has forgotten, or mixed, what stood there, or when so many are
                not in use.
        """
        if not all(isinstance(layer, Dense | Latent | Paged) for layer in self.layouts):
            raise CacheError(
                "Rings and recurrent states cannot go back to earlier tokens. Make the cache with "
                "layout='dense', or read the text again."
            )
        paged = self.pages is not None
        used = self.lengths.max() if paged else self.index
        known = not isinstance(slots, Tracer) and not isinstance(used, Tracer)
        if known and not 0 <= slots <= used:
            raise CacheError(
                f"{slots} slots cannot be kept of {used} in use; expected 0 to {used}."
            )
        keep = self.keep & (jnp.arange(self.capacity) < slots)
        lengths = jnp.minimum(self.lengths, slots) if paged else keep.sum(1, dtype=jnp.int32)
        index = jnp.asarray(slots, jnp.int32)
        return dataclasses.replace(self, index=index, keep=keep, lengths=lengths)

    def freed(self, rows: jax.Array) -> Cache:
        """With `rows`, (B,) of bool, empty again and their pages free for others.

        Raises:
            CacheError: for a cache without pages.
        """
        if self.pages is None:
            raise CacheError("Only a paged cache can free single rows; use layout='paged'.")
        return dataclasses.replace(
            self,
            lengths=jnp.where(rows, 0, self.lengths),
            shift=None if self.shift is None else jnp.where(rows, 0, self.shift),
            pages=self.pages.freed(rows),
        )

    def _each(self, change: Callable[[Any], Any]) -> Any:
        return jax.tree.map(change, self.layers, is_leaf=lambda x: isinstance(x, Layout))


def is_cache(x: Any) -> None:
    """
    Raises:
        CacheError: for something else.
    """
    if not isinstance(x, Cache):
        raise CacheError(
            f"{type(x).__name__} is no cache; expected what init_cache or a call gave back."
        )


def fits(cache: Any, wanted: Cache) -> None:
    """Check that a cache has the rows and the sizes of `wanted`, whatever its length, layouts and
    codecs; `wanted` has a ring in every layer with a window.

    Raises:
        CacheError: for another number of rows, another model's cache, or something else.
    """
    is_cache(cache)
    rows, expected = cache.keep.shape[0], wanted.keep.shape[0]
    if rows != expected:
        raise CacheError(
            f"The cache has {rows} rows and the input {expected}; a conversation goes on with the "
            "same rows."
        )
    have, want = cache.layouts, wanted.layouts
    if len(have) != len(want) or not all(map(_alike, have, want)):
        raise CacheError("The cache was made by a model of another shape; start without one.")


def _alike(have: Layout, want: Layout) -> bool:
    if isinstance(have, Ring) and not (isinstance(want, Ring) and have.window == want.window):
        return False
    return have.token == want.token


def room_for(cache: Cache, valid: Any) -> None:
    """Check, outside of compiled code, that new tokens fit; valid (B, T) is False for padding.

    Raises:
        CacheError: naming what is stored, asked and available.
    """
    if cache.endless or isinstance(cache.index, Tracer) or isinstance(valid, Tracer):
        return
    if cache.pages is None:
        used, tokens = int(cache.index), valid.shape[1]
    else:
        new = np.asarray(valid).sum(1)
        row = int(np.argmax(np.asarray(cache.lengths) + new))
        used, tokens = int(cache.lengths[row]), int(new[row])
    if used + tokens > cache.capacity:
        raise CacheError(
            f"The cache has {cache.capacity} slots, {used} are used and {tokens} more tokens were "
            "given. "
            f"Make a larger one (init_cache(batch, {used + tokens})) or call "
            f"cache.grown({used + tokens})."
        )

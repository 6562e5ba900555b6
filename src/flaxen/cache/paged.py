"""Pages from a pool: each row takes as many as it needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import Scene
from flaxen.cache.dense import wider
from flaxen.cache.layout import KeysValues, NewTokens
from flaxen.core.tree import module, static


@module
class Pages:
    """Which pages of a pool of `count` belong to whom; each holds `size` tokens.

    table: (B, n) the pages of each row in their order, -1 where it has none.
    """

    table: jax.Array
    count: static[int]
    size: static[int]

    def allocate(self, lengths: jax.Array) -> Pages:
        """Give each row free pages until it has enough for so many tokens, (B,); where none are
        left its table stays at -1.
        """
        wanted = jnp.arange(self.table.shape[1]) * self.size < lengths[:, None]
        missing = wanted & (self.table < 0)
        taken = jnp.zeros(self.count + 1, bool).at[self.table].set(True)[:-1]
        (free,) = jnp.nonzero(~taken, size=self.count, fill_value=-1)
        turn = jnp.cumsum(missing).reshape(missing.shape) - 1
        new = free.at[turn].get(mode="fill", fill_value=-1)
        table = jnp.where(missing, new.astype(jnp.int32), self.table)
        return dataclasses.replace(self, table=table)

    def enough(self, lengths: jax.Array) -> jax.Array:
        """(B,): whether a row has pages for so many tokens."""
        return (self.table >= 0).sum(1) * self.size >= lengths

    def freed(self, rows: jax.Array) -> Pages:
        """Take all pages from `rows`, (B,) of bool."""
        return dataclasses.replace(self, table=jnp.where(rows[:, None], -1, self.table))

    def grown(self, tokens: int) -> Pages:
        """With room for `tokens` in each row, and pages for them."""
        rows, old = self.table.shape
        more = max(0, -(-tokens // self.size) - old)
        table = jnp.pad(self.table, [(0, 0), (0, more)], constant_values=-1)
        return Pages(table=table, count=self.count + rows * more, size=self.size)


@module
class Paged(KeysValues):
    """Keys and values as (pages, K, page size, H); the table of pages is the same for all layers.

    Rows may be of any lengths; padding takes no place.
    """

    def write(self, stored: Any, new: Any, at: NewTokens) -> Any:
        assert at.table is not None
        count, _, size, _ = jax.tree.leaves(stored)[0].shape
        number = at.positions // size
        page = jnp.take_along_axis(at.table, number, 1, mode="fill", fill_value=-1)
        page = jnp.where(at.valid & (page >= 0), page, count)
        put = lambda old, new: old.at[page, :, at.positions % size].set(new, mode="drop")
        return jax.tree.map(put, stored, new)

    def read(self, at: NewTokens | None, dtype: Any) -> tuple[jax.Array, jax.Array]:
        assert at is not None
        assert at.table is not None
        table, (B, n) = jnp.maximum(at.table, 0), at.table.shape

        def gather(x: jax.Array) -> jax.Array:
            pages = x[table].swapaxes(2, 3)  # B n size K H
            return pages.reshape(B, n * x.shape[2], *pages.shape[3:])

        k, v = (self.codec.decode(jax.tree.map(gather, x), dtype) for x in (self.k, self.v))
        return k, v

    def seen(self, scene: Scene, at: NewTokens) -> Scene:
        assert at.table is not None
        places = jnp.arange(at.table.shape[1] * jax.tree.leaves(self.k)[0].shape[2])
        keep = places < at.lengths[:, None]
        return dataclasses.replace(scene, q_slots=at.positions, k_slots=places, keep=keep)

    def grown(self, more: int) -> Paged:
        return Paged(k=wider(self.k, more, -4), v=wider(self.v, more, -4), codec=self.codec)

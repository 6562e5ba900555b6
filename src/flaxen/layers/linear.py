"""Projections and embeddings. Weights keep the order of their file: `[out..., in...]`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.dot import dot, rows
from flaxen.core.tree import module, param, static, zeros_param


@module
class Linear:
    """x (..., in...) -> (..., out...); `contract` input axes are summed over."""

    weight: Any
    bias: Any = None
    contract: static[int] = 1

    def __call__(self, x: jax.Array) -> jax.Array:
        y = dot(x, self.weight, self.contract)
        return y if self.bias is None else y + self.bias.astype(y.dtype)


def linear(src: dict[str, int], dst: dict[str, int], *, bias: bool = False) -> Linear:
    """A projection from the axes `src` to the axes `dst`; in the file each side is one flat
    dimension.
    """
    flat = lambda axes: f"({' '.join(axes)})"
    return Linear(
        weight=param(f"{flat(dst)} {flat(src)}", **dst, **src),
        bias=zeros_param(flat(dst), **dst) if bias else None,
        contract=len(src),
    )


@module
class Embedding:
    """Token ids -> rows of a table, times `scale` rounded to the table's dtype.

    Rows from `vocab` on, if given, are padding and belong to no token. `bias` (vocab,) is of the
    scores of a tied head.
    """

    weight: Any
    bias: Any = None
    scale: static[float] = 1.0
    vocab: static[int | None] = None

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return self.vocab or self.weight.shape[0]

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = rows(self.weight, ids)
        return x if self.scale == 1.0 else x * jnp.asarray(self.scale, x.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        """Scores of every token, for a head tied to the table."""
        y = dot(x, self.weight)
        return y if self.bias is None else y + self.bias.astype(y.dtype)


@module
class PositionTable:
    """A learned vector for each position; NaN past the last one, where there is none. The table
    begins with `offset` rows of no position.
    """

    weight: Any
    offset: static[int] = 0

    def __call__(self, positions: jax.Array) -> jax.Array:
        """positions (B, T) -> (B, T, D)."""
        at = positions + self.offset
        known = at < self.weight.shape[0]
        return jnp.where(known[..., None], rows(self.weight, at), jnp.nan)

    def counted(self, slots: jax.Array, keep: jax.Array | None) -> jax.Array:
        """Positions (B, T) where none are given: they count slots, padding too."""
        return slots


@module
class TokenPositions(PositionTable):
    """OPT's: where no positions are given, they count real tokens."""

    def counted(self, slots: jax.Array, keep: jax.Array | None) -> jax.Array:
        """slots (B, T); keep (B, T) is False for padding, whose position is -1."""
        return slots if keep is None else jnp.cumsum(keep, axis=1, dtype=slots.dtype) * keep - 1


@module
class Chain:
    """One part after another, as one: what a slot holds where a family does two things there."""

    first: Any
    then: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.then(self.first(x))


def embedding(vocab: int, embed: int, scale: float = 1.0, *, bias: bool = False) -> Embedding:
    shift = zeros_param(vocab=vocab) if bias else None
    return Embedding(weight=param(vocab=vocab, embed=embed), bias=shift, scale=scale)


def position_table(
    positions: int, embed: int, offset: int = 0, kind: type[PositionTable] = PositionTable
) -> PositionTable:
    return kind(weight=param(positions=positions + offset, embed=embed), offset=offset)

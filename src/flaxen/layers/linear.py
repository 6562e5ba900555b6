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

    Rows from `vocab` on, if given, are padding and belong to no token.
    """

    weight: Any
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
        return dot(x, self.weight)


@module
class PositionTable:
    """A learned vector for each position; NaN past the last one, where there is none."""

    weight: Any

    def __call__(self, positions: jax.Array) -> jax.Array:
        """positions (B, T) -> (B, T, D)."""
        known = positions < self.weight.shape[0]
        return jnp.where(known[..., None], rows(self.weight, positions), jnp.nan)


def embedding(vocab: int, embed: int, scale: float = 1.0) -> Embedding:
    return Embedding(weight=param(vocab=vocab, embed=embed), scale=scale)


def position_table(positions: int, embed: int) -> PositionTable:
    return PositionTable(weight=param(positions=positions, embed=embed))

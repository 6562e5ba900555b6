"""Positions whose table begins with rows of none, or is not learned."""

from __future__ import annotations

import jax

from flaxen.core.tree import Param, module, param, static
from flaxen.layers.linear import PositionTable


@module
class LaterPositions(PositionTable):
    """Position 0 has the row `offset`; those before it are looked up by nobody."""

    offset: static[int] = 2

    def __call__(self, positions: jax.Array) -> jax.Array:
        """positions (B, T) -> (B, T, D)."""
        return super().__call__(positions + self.offset)


def later_positions(positions: int, embed: int, offset: int = 2) -> LaterPositions:
    return LaterPositions(weight=param(positions=positions + offset, embed=embed), offset=offset)


def wave_positions(positions: int, embed: int) -> PositionTable:
    """Sines, then cosines, of ever longer waves; files may hold them."""
    axes = {"positions": positions, "embed": embed}
    return PositionTable(weight=Param(axes, "positions embed", "waves"))

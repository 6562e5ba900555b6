"""From pixels to tokens: a convolution whose stride is its kernel is a product with each patch."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.dot import dot
from flaxen.core.tree import module, param, static, zeros_param

Grid = tuple[int, int]
"""Rows and columns."""


@module
class Patches:
    """Pictures (B, channels, height, width) -> one token for each patch, row by row (B, N, D).

    weight: (embed, channels, rows, columns). Pixels past the last whole patch are left out.
    """

    weight: Any
    bias: Any = None

    @property
    def size(self) -> Grid:
        return self.weight.shape[-2], self.weight.shape[-1]

    def __call__(self, pixels: jax.Array) -> jax.Array:
        return _tokens(self, cut(pixels, self.size))


@module
class FlatPatches:
    """Patches that are cut out already, (..., channels * frames * rows * columns), one after
    another -> (..., D). weight: (embed, channels, frames, rows, columns), or without frames.
    """

    weight: Any
    bias: Any = None

    @property
    def width(self) -> int:
        """Numbers of one patch."""
        return math.prod(self.weight.shape[1:])

    def __call__(self, patches: jax.Array) -> jax.Array:
        return _tokens(self, patches)


def _tokens(part: Patches | FlatPatches, patches: jax.Array) -> jax.Array:
    weight = part.weight.reshape(len(part.weight), -1)
    y = dot(patches.astype(weight.dtype), weight)
    return y if part.bias is None else y + part.bias.astype(y.dtype)


def cut(pixels: jax.Array, size: Grid) -> jax.Array:
    """(B, C, height, width) -> (B, N, C * rows * columns): whole patches, row by row."""
    B, C, height, width = pixels.shape
    (r, c), (R, K) = size, grid_of((height, width), size)
    x = pixels[:, :, : R * r, : K * c].reshape(B, C, R, r, K, c)
    return x.transpose(0, 2, 4, 1, 3, 5).reshape(B, R * K, C * r * c)


def grid_of(image: Grid, patch: Grid) -> Grid:
    """How many whole patches a picture has."""
    return image[0] // patch[0], image[1] // patch[1]


@module
class GridPositions:
    """A learned vector for each place of a grid, and for `leading` tokens before it.

    weight: (leading + rows * columns, D). Other grids get vectors between those that are there, by
    a `way` of `RESAMPLING`.
    """

    weight: Any
    grid: static[Grid]
    leading: static[int] = 0
    way: static[str] = "cubic"

    def __call__(self, grid: Grid) -> jax.Array:
        """The vectors for a picture of so many patches: (leading + N, D)."""
        table = jnp.asarray(self.weight)
        if grid == self.grid:
            return table
        places = resampled(table[self.leading :], self.grid, grid, self.way)
        return jnp.concatenate([table[: self.leading], places.astype(table.dtype)])


def resampled(table: jax.Array, old: Grid, new: Grid, way: str = "cubic") -> jax.Array:
    """(rows * columns, D) of one grid -> those of another; float32. way: of `RESAMPLING`."""
    down, across = (jnp.asarray(RESAMPLING[way](n, m)) for n, m in zip(old, new, strict=True))
    square = table.reshape(*old, -1).astype(jnp.promote_types(table.dtype, jnp.float32))
    return jnp.einsum("iR,jK,RKD->ijD", down, across, square).reshape(new[0] * new[1], -1)


def cubic(old: int, new: int) -> np.ndarray:
    """How much of each of `old` numbers is in each of `new` ones, (new, old).

    Keys' kernel with a = -0.75, centres aligned, edges repeated: what torch calls bicubic.
    """
    where = (np.arange(new) + 0.5) * (old / new) - 0.5
    first = np.floor(where).astype(np.int64)
    out = np.zeros((new, old), np.float32)
    for tap in range(-1, 3):
        weight = _keys(np.abs(where - (first + tap)), -0.75)
        np.add.at(out, (np.arange(new), np.clip(first + tap, 0, old - 1)), weight)
    return out


def antialiased(old: int, new: int) -> np.ndarray:
    """The same with a = -0.5 and a kernel as wide as the new numbers stand apart, cut off at the
    edges: torch's bicubic with antialias, and Pillow's.
    """
    scale = old / new
    centre, wide = (np.arange(new) + 0.5) * scale, max(scale, 1.0)
    out = _keys(np.abs(np.arange(old) + 0.5 - centre[:, None]) / wide, -0.5)
    return (out / out.sum(1, keepdims=True)).astype(np.float32)


RESAMPLING = {"cubic": cubic, "antialiased": antialiased}


def _keys(x: np.ndarray, a: float) -> np.ndarray:
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def patches(embed: int, channels: int, size: Grid, *, bias: bool = True) -> Patches:
    axes = {"embed": embed, "channels": channels, "rows": size[0], "columns": size[1]}
    return Patches(weight=param(**axes), bias=zeros_param(embed=embed) if bias else None)


def flat_patches(embed: int, channels: int, size: Grid, frames: int | None = None) -> FlatPatches:
    deep = {} if frames is None else {"frames": frames}
    places = {**deep, "rows": size[0], "columns": size[1]}
    return FlatPatches(weight=param(embed=embed, channels=channels, **places))


def grid_positions(
    grid: Grid, embed: int, leading: int = 0, layout: str = "", way: str = "cubic"
) -> GridPositions:
    weight = param(layout, positions=leading + grid[0] * grid[1], embed=embed)
    return GridPositions(weight=weight, grid=grid, leading=leading, way=way)

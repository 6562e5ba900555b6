"""Qwen's pictures and films: patches that come flat, with the grids that they fill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import InputError
from flaxen.core.tree import module, static
from flaxen.models.inputs import array
from flaxen.models.packed_vision import PackedTower, Pictures


@module
class GridTower(PackedTower):
    """second: how far positions go on in one second of a film, if that counts."""

    second: static[float | None] = None

    inputs: ClassVar[tuple[str, ...]] = (
        "pixel_values",
        "image_grid_thw",
        "pixel_values_videos",
        "video_grid_thw",
        "second_per_grid_ts",
    )

    def pictures(self, given: Mapping[str, Any]) -> Pictures:
        """What is given of images and of films, in one row.

        Raises:
            InputError: patches that do not fill their grids, or lack.
        """
        seconds = given.get("second_per_grid_ts")
        kinds = [
            self._kind(given, "pixel_values", "image_grid_thw", None),
            self._kind(given, "pixel_values_videos", "video_grid_thw", seconds),
        ]
        grids = [grid for _, some in kinds for grid in some]
        rows = [pixels for pixels, some in kinds if some]
        joined = jnp.concatenate if any(isinstance(x, jax.Array) for x in rows) else np.concatenate
        unit = self.merge**2
        tokens = tuple(
            [(t, h // self.merge, w // self.merge, step) for (t, h, w), step in some]
            for _, some in kinds
        )
        counts = tuple(sum(t * h * w for (t, h, w), _ in some) // unit for _, some in kinds)
        return Pictures(self.packed(joined(rows), [g for g, _ in grids]), counts, tokens)

    def _kind(self, given: Mapping[str, Any], pixels: str, grid: str, seconds: Any) -> Any:
        if (pixels in given) != (grid in given):
            raise InputError(f"{pixels} and {grid} belong together; give both, or neither.")
        if pixels not in given:
            return None, []
        x, sizes = array(given[pixels]), np.asarray(given[grid])
        if sizes.ndim != 2 or sizes.shape[1] != 3 or sizes.dtype.kind not in "iu":
            raise InputError(
                f"{grid} is {sizes.dtype} of shape {sizes.shape}; expected whole numbers of shape "
                "(pictures, 3): frames, rows and columns of patches."
            )
        patches = int(sizes.prod(1).sum())
        if x.shape != (patches, self.patches.width) or sizes.min(initial=1) < 1:
            raise InputError(
                f"{pixels} have shape {x.shape}; {grid} says {sizes.tolist()}, which is "
                f"{(patches, self.patches.width)}: one row for each patch."
            )
        if (sizes[:, 1:] % self.merge).any():
            raise InputError(
                f"{grid} says {sizes.tolist()}; rows and columns must divide by {self.merge}."
            )
        times = np.ones(len(sizes)) if seconds is None else np.asarray(seconds, float).reshape(-1)
        if len(times) != len(sizes):
            raise InputError(f"second_per_grid_ts has {len(times)} numbers for {len(sizes)} films.")
        timed = grid == "video_grid_thw" and self.second is not None
        steps = times * (self.second or 1.0) if timed else np.ones(len(sizes))
        return x, [(tuple(map(int, s)), float(t)) for s, t in zip(sizes, steps, strict=True)]


def positions_of(
    ids: np.ndarray, mask: np.ndarray, grids: Mapping[int, list[tuple[int, int, int, float]]]
) -> tuple[np.ndarray, np.ndarray]:
    """Time, row and column of each token, (3, B, T), and how much further the next position is than
    the number of tokens, (B,). grids: of the pictures that a token of this number stands for.

    A word goes on by one on all axes; a picture spreads from where it begins, and goes on by its
    longer side.
    """
    rest = {token: iter(some) for token, some in grids.items()}
    out, shift = np.zeros((3, *ids.shape), np.int32), np.zeros(len(ids), np.int32)
    for b, row in enumerate(ids):
        real = np.flatnonzero(mask[b])
        placed = _row_positions(row[real], rest)
        out[:, b, real] = placed
        shift[b] = placed.max() + 1 - len(real)
    return out, shift


def _row_positions(row: np.ndarray, rest: Mapping[int, Iterator[Any]]) -> np.ndarray:
    pictured = np.isin(row, list(rest))
    parts, at, i = [], 0, 0
    while i < len(row):
        if pictured[i]:
            t, h, w, step = next(rest[int(row[i])], (0, 0, 0, 0))
            box = np.indices((t, h, w)).reshape(3, -1)
            box[0] = (box[0] * step).astype(np.int64)
            size, further = box.shape[1], max(h, w)
            if not size or i + size > len(row) or (row[i : i + size] != row[i]).any():
                raise InputError(
                    f"Token {row[i]} stands for parts of pictures, but what stands there is not "
                    f"the {size} of the next picture. Use the processor of this model."
                )
        else:
            ahead = np.flatnonzero(pictured[i:])
            size = further = int(ahead[0]) if len(ahead) else len(row) - i
            box = np.broadcast_to(np.arange(size), (3, size))
        parts.append(box + at)
        at, i = at + further, i + size
    return np.concatenate(parts, 1)

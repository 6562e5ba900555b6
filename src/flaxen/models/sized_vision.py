"""Pixtral's pictures: any size, in an array that holds the largest, with their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import InputError
from flaxen.core.tree import module, static
from flaxen.layers.patches import FlatPatches, Grid, cut, grid_of
from flaxen.models.inputs import array
from flaxen.models.packed_vision import PackedTower, Pictures


@module
class SizedTower(PackedTower):
    """size: pixels of a patch."""

    patches: FlatPatches
    size: static[Grid]

    inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "image_sizes")

    def pictures(self, given: Mapping[str, Any]) -> Pictures:
        """Pictures (B, C, H, W) of which image_sizes (B, 2) are the parts that count; without
        sizes, all.

        Raises:
            InputError: sizes that are not those of the pictures, or that leave parts of a token.
        """
        if "pixel_values" not in given:
            raise InputError("image_sizes belong to pixel_values, which are missing.")
        pixels = array(given["pixel_values"])
        channels = self.patches.weight.shape[1]
        if pixels.ndim != 4 or not len(pixels) or pixels.shape[1] != channels:
            raise InputError(
                f"pixel_values have shape {pixels.shape}; expected (pictures, {channels}, height, "
                "width), as the image processor makes them."
            )
        whole = np.broadcast_to(pixels.shape[2:], (len(pixels), 2))
        sizes = np.asarray(given.get("image_sizes", whole))
        if sizes.shape != whole.shape or (sizes > whole).any():
            raise InputError(
                f"image_sizes are {sizes.tolist()}; expected height and width of each of "
                f"{len(pixels)} pictures, of at most {pixels.shape[2:]}."
            )
        grids = [grid_of((int(h), int(w)), self.size) for h, w in sizes]
        if any(h < 1 or w < 1 or h % self.merge or w % self.merge for h, w in grids):
            raise InputError(
                f"image_sizes {sizes.tolist()} are {grids} patches; expected rows and columns that "
                f"divide by {self.merge}."
            )
        rows = [self._patches(x, grid) for x, grid in zip(pixels, grids, strict=True)]
        joined = np.concatenate if isinstance(pixels, np.ndarray) else jnp.concatenate
        count = sum(h * w for h, w in grids) // self.merge**2
        return Pictures(self.packed(joined(rows), [(1, h, w) for h, w in grids]), (count,))

    def _patches(self, pixels: Any, grid: Grid) -> Any:
        """The patches of one picture (C, H, W), those of one token together: (N, F)."""
        (h, w), (r, c), m = grid, self.size, self.merge
        x = cut(pixels[None, :, : h * r, : w * c], self.size)[0]
        blocks = x.reshape(h // m, m, w // m, m, -1)
        return blocks.swapaxes(1, 2).reshape(h * w, -1)

"""Tokens with several positions: angles (axes, B, T, frequencies) -> one angle for each pair."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.core.errors import InputError


def in_sections(angle: jax.Array, sections: tuple[int, ...]) -> jax.Array:
    """The first `sections[0]` pairs turn with time, the next ones with the row, the last with the
    column (Qwen2-VL).
    """
    starts = np.cumsum(sections)[:-1].tolist()
    parts = [jnp.split(a, starts, -1)[i] for i, a in enumerate(angle)]
    return jnp.concatenate(parts, -1)


def in_turns(angle: jax.Array, sections: tuple[int, ...]) -> jax.Array:
    """Pairs take time, row, column, time...; those past a row's or column's share take time
    (Qwen3-VL).
    """
    axis = np.arange(angle.shape[-1]) % 3
    axis = np.where(np.arange(len(axis)) < 3 * np.array(sections)[axis], axis, 0)
    return jnp.take_along_axis(angle, jnp.asarray(axis)[None, None, None], 0)[0]


def by_row_and_column(angle: jax.Array) -> jax.Array:
    """The first half of the pairs turns with the row, the other with the column (vision)."""
    return jnp.concatenate([angle[0], angle[1]], -1)


def grid_positions(height: int, width: int, merge: int = 1) -> np.ndarray:
    """Rows and columns of an image's patches, (2, height * width), for an axial rope.

    Patches come block by block, `merge` x `merge` in each: those that one token is made of stand
    together.

    Raises:
        InputError: where the blocks do not fill the grid.
    """
    if height % merge or width % merge:
        raise InputError(
            f"A grid of {height} x {width} patches has no whole blocks of {merge} x {merge}. "
            "Resize the image, or merge fewer patches."
        )
    blocks = np.indices((height, width), np.int32)
    blocks = blocks.reshape(2, height // merge, merge, width // merge, merge)
    return blocks.swapaxes(2, 3).reshape(2, -1)

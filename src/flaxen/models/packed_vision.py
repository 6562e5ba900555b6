"""Pictures of any size: their patches stand in one row, and each looks at its own picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import Scene
from flaxen.core.errors import InputError
from flaxen.core.tree import module, static, walk
from flaxen.layers.attention import Attention
from flaxen.layers.context import Context
from flaxen.layers.linear import Linear
from flaxen.layers.mlp import ACTIVATIONS
from flaxen.layers.patches import FlatPatches
from flaxen.layers.rope_axes import grid_positions
from flaxen.layers.runtime import Runtime
from flaxen.models.fold import run
from flaxen.models.inputs import array

WINDOWS = 1 << 16
"""Segments are numbered by frame, so many numbers for the windows of each."""


@module
class AcrossWindows(Attention):
    """Attention over whole frames, in a scene whose segments are their windows."""

    def __call__(self, x: jax.Array, ctx: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        return super().__call__(x, self._frames(ctx), cache)

    def weights(self, x: jax.Array, ctx: Context) -> jax.Array:
        return super().weights(x, self._frames(ctx))

    def _frames(self, ctx: Context) -> Context:
        segments = ctx.scene.q_segments
        assert segments is not None
        frames = segments // WINDOWS
        scene = dataclasses.replace(ctx.scene, q_segments=frames, k_segments=frames)
        return dataclasses.replace(ctx, scene=scene)


@module
class Merger:
    """Neighbouring patches become one token of the text model: last(gelu(first(norm(x))))."""

    norm: Any
    first: Linear
    last: Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        """(N, D) -> (M, D'); patches of one token stand together."""
        together = self.norm(x).reshape(-1, self.first.weight.shape[-1])
        return self.last(ACTIVATIONS["gelu"](self.first(together)))


@module
class Packed:
    """patches: (N, F); positions: (2, 1, N), rows and columns; segments: (1, N)."""

    patches: Any
    positions: Any
    segments: Any


@dataclasses.dataclass(frozen=True)
class Pictures:
    """What the vision model is given, and how many tokens come of it for each kind of picture;
    grids: of each kind, frames, rows and columns in tokens and the time from frame to frame.
    """

    arrays: Any
    counts: tuple[int, ...]
    grids: tuple[list[tuple[int, int, int, float]], ...] = ()


@module
class PackedTower:
    """merge: patches on a side of what becomes one token; window: tokens on a side of the windows
    in which most layers look, if any; second: how far positions go on in one second of a film.
    """

    patches: FlatPatches
    layers: Any
    merger: Merger
    merge: static[int]
    window: static[int | None] = None
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
        return Pictures(self._packed(joined(rows), [g for g, _ in grids]), counts, tokens)

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
        film = grid == "video_grid_thw" and self.second is not None
        steps = times * self.second if film else np.ones(len(sizes))
        return x, [(tuple(map(int, s)), float(t)) for s, t in zip(sizes, steps, strict=True)]

    def _packed(self, patches: Any, grids: list[tuple[int, int, int]]) -> Packed:
        """Patches with their places, and empty ones up to a size that other pictures share."""
        places, segments, frame = [], [], 0
        for t, h, w in grids:
            place, windows = grid_positions(h, w, self.merge), self._windows(h, w)
            for _ in range(t):
                places.append(place)
                segments.append(frame * WINDOWS + windows)
                frame += 1
        count = len(patches)
        after = shared_size(count) - count
        # What stands behind belongs to a frame of its own.
        pad = lambda x, value: np.pad(x, [(0, 0), (0, after)], constant_values=value)
        fill = jnp.pad if isinstance(patches, jax.Array) else np.pad
        return Packed(
            patches=fill(patches, [(0, after), (0, 0)]),
            positions=pad(np.concatenate(places, 1), 0)[:, None].astype(np.int32),
            segments=pad(np.concatenate(segments)[None], frame * WINDOWS).astype(np.int32),
        )

    def _windows(self, rows: int, columns: int) -> np.ndarray:
        """The window of each patch of a frame."""
        if self.window is None:
            return np.zeros(rows * columns, np.int64)
        down, across = grid_positions(rows, columns, self.merge) // (self.window * self.merge)
        return down * (across.max() + 1) + across

    def context(self, packed: Packed, runtime: Runtime) -> Context:
        """What the layers look at."""
        slots = jnp.arange(packed.segments.shape[1], dtype=jnp.int32)
        attentions = (m for m in walk(self.layers) if isinstance(m, Attention))
        ropes = tuple(dict.fromkeys(a.rope for a in attentions if a.rope is not None))
        segments = jnp.asarray(packed.segments)
        return Context(
            positions=packed.positions,
            scene=Scene(
                q_slots=slots,
                k_slots=slots,
                q_segments=segments,
                k_segments=segments,
                aligned=True,
            ),
            rotary=tuple(rope.tables(jnp.asarray(packed.positions)) for rope in ropes),
            ropes=ropes,
            runtime=runtime,
        )

    def features(self, packed: Packed, runtime: Runtime) -> jax.Array:
        """One token of the text model for each `merge` x `merge` patches: (N / merge ** 2, D)."""
        with runtime.products():
            x = runtime.computing(self.patches(jnp.asarray(packed.patches)))[None]
            x, _, _ = run(self.layers, x, self.context(packed, runtime), None, False)
            return self.merger(x[0])


def shared_size(count: int) -> int:
    """The next of a few sizes, an eighth larger at most from 512 on; other pictures meet a program
    that is compiled already.
    """
    step = max(64, 1 << max(count.bit_length() - 3, 0))
    return -(-count // step) * step


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

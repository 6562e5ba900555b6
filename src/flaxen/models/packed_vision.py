"""Pictures of any size: their patches stand in one row, and each looks at its own picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import Scene
from flaxen.core.tree import module, static, walk
from flaxen.layers.attention import Attention
from flaxen.layers.context import Context
from flaxen.layers.norm import Identity
from flaxen.layers.rope_axes import grid_positions
from flaxen.layers.runtime import Runtime
from flaxen.models.fold import run

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
    """pre_norm: before the layers; merge: patches on a side of what the merger makes one token of;
    window: tokens on a side of the windows in which most layers look, if any.
    """

    patches: Any
    layers: Any
    pre_norm: Any = Identity()
    merger: Any
    merge: static[int] = 1
    window: static[int | None] = None

    def packed(self, patches: Any, grids: Sequence[tuple[int, int, int]]) -> Packed:
        """Patches (N, F) of pictures of so many frames, rows and columns with their places, and
        empty ones up to a size that other pictures share.
        """
        places, segments, frame = [], [], 0
        for t, h, w in grids:
            place, windows = grid_positions(h, w, self.merge), self._windows(h, w)
            for _ in range(t):
                places.append(place)
                segments.append(frame * WINDOWS + windows)
                frame += 1
        after = shared_size(len(patches)) - len(patches)
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
            ctx = self.context(packed, runtime)
            x, _, _ = run(self.layers, self.pre_norm(x), ctx, None, False)
            return self.merger(x[0])


def shared_size(count: int) -> int:
    """The next of a few sizes, an eighth larger at most from 512 on; other pictures meet a program
    that is compiled already.
    """
    step = max(64, 1 << max(count.bit_length() - 3, 0))
    return -(-count // step) * step

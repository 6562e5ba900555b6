"""How arrays are cut into tiles for the flash kernels, and how a kernel is run on each platform.

B batch, K kv_heads, R rows (queries times group), S keys, H head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flaxen.attention.call import Scene
from flaxen.attention.flash_tile import Marks, Plan, keys_of, rows_of

NOBODY = -(2**31)
"""The id of a key that is hidden from all rows."""
PADDED = NOBODY + 1
"""The id of a row that pads a block."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of the blocks of rows and keys, and of the tile that is walked over."""

    bq: int
    bk: int
    major: int

    @classmethod
    def of(cls, plan: Plan, rows: int, keys: int, names: tuple[str, str, str], over: int) -> Tiling:
        """By the names of three sizes in `Blocks`; `over` is the walked length, rows or keys."""
        bq, bk, major = (plan.blocks.get(name) for name in names)
        # A TPU slices vectors by whole lanes, a GPU multiplies powers of two.
        least = 128 if plan.platform == "tpu" else 16
        bq, bk = (max(least, power(min(n, have))) for n, have in ((bq, rows), (bk, keys)))
        inner = bq if names[2][0] == "q" else bk
        count = -(-over // inner)
        each = count if plan.platform == "gpu" else min(count, max(1, major // inner))
        return cls(bq, bk, inner * each)


def power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def pad(x: jax.Array, size: int, axis: int = 2, value: int = 0) -> jax.Array:
    """Up to a multiple of `size`."""
    more = -x.shape[axis] % size
    if not more:
        return x
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=value)


def segment_ids(scene: Scene, batch: int, queries: int, keys: int) -> tuple[jax.Array, jax.Array]:
    """Segments (B, T) and (B, S), in which hidden keys have one of their own."""
    mine, theirs = jnp.zeros((batch, queries), jnp.int32), jnp.zeros((batch, keys), jnp.int32)
    if scene.q_segments is not None and scene.k_segments is not None:
        mine, theirs = (x.astype(jnp.int32) for x in (scene.q_segments, scene.k_segments))
    if scene.keep is not None:
        theirs = jnp.where(scene.keep, theirs, NOBODY)
    return mine, theirs


def standing(marks: Marks, size: int, nobody: int) -> Marks:
    """Marks of the side that is fixed or walked over, one below the other: (..., length, 1)."""
    return jax.tree.map(lambda x: x[..., None], _padded(marks, size, nobody))


def lying(marks: Marks, size: int, nobody: int) -> Marks:
    """One beside the other: (..., 1, length)."""
    return jax.tree.map(lambda x: x[..., None, :], _padded(marks, size, nobody))


def _padded(marks: Marks, size: int, nobody: int) -> Marks:
    ids = pad(marks.ids, size, marks.ids.ndim - 1, nobody)
    more = jax.tree.map(lambda x: pad(x, size, x.ndim - 1), marks)
    return more._replace(ids=ids)


def run(
    kernel: Any, plan: Plan, grid: Any, args: Any, cuts: Any, shapes: Any, fixed: Any
) -> list[jax.Array]:
    """One `pallas_call`: Mosaic for TPU, Triton for GPU, interpreted elsewhere. Results float32."""
    params = None
    if plan.platform == "tpu":
        from jax.experimental.pallas import tpu

        params = tpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",))
    elif plan.platform == "gpu":
        from jax.experimental.pallas import triton

        params = triton.CompilerParams(num_warps=8 if args[0].shape[-1] > 64 else 4, num_stages=2)
    outs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    # Kernels count in 32 bits, whatever the rest of the program does.
    with jax.enable_x64(False):
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=cuts,
            out_specs=[fixed(x) for x in outs],
            out_shape=outs,
            interpret=plan.platform not in ("tpu", "gpu"),
            compiler_params=params,
        )(*args)


def specs(plan: Plan, tiling: Tiling, length: int, rows_fixed: bool) -> Any:
    """Block specs of arrays of the fixed and of the walked side, of `length`.

    Arrays are (B, K, length, H), or marks: (B or 1, length, 1) standing, (B or 1, 1, length) lying.
    """
    bq, bk = tiling.bq, tiling.bk
    fixed_size, inner = (bq, bk) if rows_fixed else (bk, bq)
    each, span = tiling.major // inner, keys_of if rows_fixed else rows_of

    def tile(i: Any, c: Any) -> Any:
        # A tile in which nothing is seen is not fetched: the nearest one that is needed stays.
        low, high = span(plan, i, bq, bk, length // inner)
        last = length // tiling.major - 1
        low, high = (jax.lax.div(x, each) for x in (low, jax.lax.max(high - 1, 0)))
        return jax.lax.min(jax.lax.clamp(jax.lax.min(low, high), c, high), last)

    def spec(x: Any, size: int, at: Callable[[Any, Any], Any]) -> pl.BlockSpec:
        lies, heads = x.shape[-2] == 1, x.ndim == 4
        block = (1, size) if lies else (size, x.shape[-1])

        def index(b: Any, h: Any, i: Any, c: Any) -> Any:
            lead = (b if x.shape[0] > 1 else 0, *([h] if heads else []))
            return (*lead, 0, at(i, c)) if lies else (*lead, at(i, c), 0)

        return pl.BlockSpec((None,) * (2 if heads else 1) + block, index)

    fixed = lambda x: spec(x, fixed_size, lambda i, c: i)
    walked = lambda x: spec(x, tiling.major, tile)
    return fixed, walked

"""The arithmetic of one tile of flash attention, and which tiles there is something to see in.

R rows (queries times the heads that share their keys), S keys, H head_dim. A tile is rows by keys,
or keys by rows (`flip`), where marks of rows and of keys broadcast against each other.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxen.attention.call import Mask
from flaxen.attention.settings import Blocks

HIDDEN = -1e30
"""The score of what is not seen: finite, for infinities less infinities are not numbers."""
FAR = 2**30


class Marks(NamedTuple):
    """What decides which rows see which keys, int32; absent where it plays no part.

    slots; ids: equal where a row may see a key at all; pieces: of chunks; reach (rows only): keys
    in slots below it are seen whatever the pattern; slopes (rows only, float32): ALiBi.
    """

    slots: Any
    ids: Any
    pieces: Any = None
    reach: Any = None
    slopes: Any = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a kernel knows when it is compiled."""

    mask: Mask
    scale: float
    softcap: float | None
    group: int
    aligned: bool
    blocks: Blocks
    platform: str


def see(mask: Mask, rows: Marks, keys: Marks) -> jax.Array:
    """A tile of bools."""
    behind = rows.slots - keys.slots
    pattern = []
    if mask.causal:
        pattern.append(behind >= 0)
    if mask.window:
        pattern.append(behind < mask.window if mask.causal else abs(behind) <= mask.window)
    if mask.chunk:
        pattern.append(rows.pieces == keys.pieces)
    seen = rows.ids == keys.ids
    if not pattern:
        return seen
    inside = pattern[0]
    for part in pattern[1:]:
        inside = inside & part
    if rows.reach is not None:
        inside = inside | (keys.slots < rows.reach)
    return seen & inside


def scores(
    plan: Plan, q: jax.Array, k: jax.Array, rows: Marks, keys: Marks, flip: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scores up to the softcap, scores with everything added, and where they are seen."""
    capped = (last_axes(k, q) if flip else last_axes(q, k)) * plan.scale
    if plan.softcap:
        capped = plan.softcap * jnp.tanh(capped / plan.softcap)
    full = capped
    if rows.slopes is not None:
        full = full - rows.slopes * distance(rows, keys)
    return capped, full, see(plan.mask, rows, keys)


def softmax_step(
    plan: Plan, now: tuple[jax.Array, ...], q: Any, k: Any, v: Any, rows: Marks, keys: Marks
) -> tuple[jax.Array, ...]:
    """Running (maximum, sum, mixed values) of rows, with the keys of one more tile."""
    top, total, mixed = now
    _, s, seen = scores(plan, q, k, rows, keys)
    s = jnp.where(seen, s, HIDDEN)
    higher = jnp.maximum(top, jnp.max(s, axis=1, keepdims=True))
    past, e = jnp.exp(top - higher), jnp.where(seen, jnp.exp(s - higher), 0)
    total = total * past + jnp.sum(e, axis=1, keepdims=True)
    return higher, total, mixed * past + product(e.astype(v.dtype), v)


def score_gradients(
    plan: Plan, q: Any, k: Any, v: Any, grad: Any, lse: Any, mean: Any, rows: Marks, keys: Marks,
    flip: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Weights of a tile, the gradient of its q @ k, and that of its full scores."""
    capped, s, seen = scores(plan, q, k, rows, keys, flip)
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    full = p * ((last_axes(v, grad) if flip else last_axes(grad, v)) - mean)
    inner = full * (1 - (capped / plan.softcap) ** 2) if plan.softcap else full
    return p, inner * plan.scale, full


def distance(rows: Marks, keys: Marks) -> jax.Array:
    return abs(rows.slots - keys.slots).astype(jnp.float32)


def last_axes(a: jax.Array, b: jax.Array) -> jax.Array:
    """(I, H) and (J, H) -> (I, J), float32."""
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """(I, J) and (J, H) -> (I, H), float32."""
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def keys_of(plan: Plan, i: Any, bq: int, bk: int, blocks: int) -> tuple[Any, Any]:
    """From which block of keys on, and before which, block `i` of rows sees any."""
    first, last = _div(i * bq, plan.group), _div(i * bq + bq - 1, plan.group)
    low, high = _span(plan, first, last, *_reach(plan.mask))
    return _blocks(low, high, bk, blocks)


def rows_of(plan: Plan, j: Any, bq: int, bk: int, blocks: int) -> tuple[Any, Any]:
    """From which block of rows on, and before which, block `j` of keys is seen by any."""
    back, ahead = _reach(plan.mask)
    low, high = _span(plan, j * bk, j * bk + bk - 1, ahead, back)
    high = jax.lax.min(high, FAR // plan.group)
    return _blocks(low * plan.group, high * plan.group + plan.group - 1, bq, blocks)


def _reach(mask: Mask) -> tuple[int, int]:
    """How far back and ahead a query sees, wherever its chunk begins."""
    back = ahead = mask.chunk - 1 if mask.chunk else FAR
    if mask.window:
        back = min(back, mask.window - mask.causal)
        ahead = min(ahead, mask.window)
    return back, 0 if mask.causal else ahead


def _span(plan: Plan, first: Any, last: Any, back: int, ahead: int) -> tuple[Any, Any]:
    """The first and the last key that queries `first` to `last` are tied to, or the other way."""
    if not plan.aligned or plan.mask.prefix:
        return first * 0, last * 0 + FAR
    return jax.lax.max(first - back, 0), last + ahead


def _blocks(low: Any, high: Any, size: int, count: int) -> tuple[Any, Any]:
    return jax.lax.min(_div(low, size), count), jax.lax.min(_div(high, size) + 1, count)


def _div(x: Any, by: int) -> Any:
    # `//` rounds down, which kernels for GPUs cannot; nothing here is negative.
    return jax.lax.div(x, by)

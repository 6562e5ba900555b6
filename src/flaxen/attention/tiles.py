"""Tiles of an attention call, some queries and some keys each, and the loops over them.

B batch, K kv_heads, G group, T queries, S keys, H head_dim. Arrays are (B, K, G, T, H).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention.call import Call, Extras, Scene
from flaxen.attention.online import dropout_factors, score_terms

FEW = 16
"""So many queries are one block with all keys in one tile, as a step of decoding should be."""

SMALL = 2**17
"""Up to so many scores of a head, blocks of queries are written out, each with all the keys it can
see in one tile, and what they computed is remembered for the backward pass. Beyond, they are looped
over in tiles that stay in the processor's cache (on CPU that is faster from 512 tokens on),
nothing is remembered, and neither the program nor its memory grows.
"""


@dataclasses.dataclass(frozen=True)
class Tile:
    """`queries` from `q` on and `keys` from `k` on."""

    q: Any
    queries: int
    k: Any
    keys: int

    def scene(self, scene: Scene) -> Scene:
        """What belongs to the tile."""
        return dataclasses.replace(
            scene,
            q_slots=cut(scene.q_slots, self.q, self.queries, -1),
            k_slots=cut(scene.k_slots, self.k, self.keys, -1),
            keep=cut(scene.keep, self.k, self.keys, 1),
            q_segments=cut(scene.q_segments, self.q, self.queries, 1),
            k_segments=cut(scene.k_segments, self.k, self.keys, 1),
        )

    def terms(self, call: Call, scene: Scene, extras: Extras) -> jax.Array:
        """`score_terms` of the tile."""
        bias = cut(cut(extras.bias, self.q, self.queries, 2), self.k, self.keys, 3)
        own = dataclasses.replace(extras, bias=bias)
        return score_terms(call.mask, self.scene(scene), own, call.kv_heads)

    def kept(self, call: Call, extras: Extras, batch: int) -> jax.Array | None:
        """The factors of dropout, (B, K, G, T, S): the same whenever they are asked for."""
        if not call.dropout or extras.dropout_key is None:
            return None
        key = jax.random.fold_in(jax.random.fold_in(extras.dropout_key, self.q), self.k)
        shape = (batch, call.kv_heads, call.group, self.queries, self.keys)
        return dropout_factors(key, call.dropout, shape)


def looped(call: Call) -> bool:
    """Whether a call is large."""
    return call.queries > FEW and call.queries * call.keys > SMALL


def query_block(call: Call) -> int:
    """How many queries a tile has, at most."""
    return min(call.settings.blocks.q, call.queries)


def over_queries(call: Call, body: Callable[..., Any], carry: Any) -> tuple[Any, Any]:
    """body(carry, first, count) -> (carry, arrays) for each block of queries; the last carry, and
    the arrays put together along T.
    """
    size = query_block(call)
    if not looped(call):
        found = []
        for first in range(0, call.queries, size):
            carry, part = body(carry, first, min(size, call.queries - first))
            found.append(part)
        return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=3), *found)
    firsts = jnp.arange(0, call.queries, size)
    carry, found = jax.lax.scan(lambda now, first: body(now, first, size), carry, firsts)
    joined = lambda x: jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], -1, x.shape[5])
    return carry, jax.tree.map(joined, found)


def over_keys(
    call: Call, body: Callable[[Any, Tile], Any], carry: Any, first: Any, count: int
) -> Any:
    """body(carry, tile) -> carry for the keys that `count` queries from `first` on can see."""
    low, high = _key_range(call, first, first + count)
    if not looped(call):
        low, high = max(low, 0), min(high, call.keys)
        return body(carry, Tile(first, count, low, high - low))
    size = call.settings.blocks.k
    low, high = jnp.maximum(low, 0) // size, (jnp.minimum(high, call.keys) + size - 1) // size
    turn = lambda i, now: body(now, Tile(first, count, i * size, size))
    return jax.lax.fori_loop(low, high, turn, carry)


def _key_range(call: Call, first: Any, last: Any) -> tuple[Any, Any]:
    """From which key on, and up to which, the queries from `first` to before `last` can see any."""
    mask = call.mask
    if not call.aligned or mask.prefix:
        return 0, call.keys
    low = first - mask.window + mask.causal if mask.window else 0
    return low, last if mask.causal else last + mask.window if mask.window else call.keys


def cut(x: Any, start: Any, size: int, axis: int) -> Any:
    """A piece of an array; nothing of nothing."""
    if x is None or x.shape[axis] == size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def padded(x: Any, size: int, axis: int) -> Any:
    """Zeros up to the next multiple of `size`."""
    if x is None or x.shape[axis] % size == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, widths)

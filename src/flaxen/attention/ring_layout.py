"""How a sequence lies on a ring of devices: tiles, an early and a late piece for each, and which
tiles see each other.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention.call import Call, Extras, Mask, Scene

FAR = 2**30
"""Beyond any slot, and its double still fits 32 bits."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """One sequence on a ring: every device holds `tiles` tiles of `tile` tokens."""

    tile: int
    tiles: int

    @property
    def local(self) -> int:
        return self.tile * self.tiles


@dataclasses.dataclass(frozen=True)
class Ring:
    """How one call goes around.

    axis: of the mesh; None on one device. hops: how often keys move on. few: every device has all
    queries, and keys stay where they are. balanced: of 2n pieces, device i has i and 2n - 1 - i.
    """

    axis: str | None
    size: int
    hops: int
    few: bool
    balanced: bool
    queries: Cut
    keys: Cut

    def held(self, device: int) -> list[int]:
        """Which tiles of an aligned sequence a device holds, in order of the sequence."""
        tiles = self.queries.tiles
        if not self.balanced:
            return list(range(device * tiles, (device + 1) * tiles))
        late = 2 * self.size - 1 - device
        half = tiles // 2
        return [p * half + i for p in (device, late) for i in range(half)]


def plan(call: Call, near: bool = False) -> Ring:
    """The ring of a call as its settings say; `near` asks only those devices that the mask reaches.

    Where queries are not the keys and much fewer, moving them is cheaper than moving keys.
    """
    size, settings = ring_size(call), call.settings
    reach = reach_of(call) if near else None
    few = size > 1 and not (call.aligned and call.queries >= size)
    few = few and call.queries * size <= max(call.keys, size * size)
    balanced = settings.balanced and size > 1 and call.aligned and call.mask.causal
    balanced = balanced and not few and reach is None
    pieces = 2 if balanced else 1
    q_tile = settings.blocks.q if settings.scan_ring else call.queries
    k_tile = settings.blocks.k if settings.scan_ring else call.keys
    if call.aligned:
        q_tile = k_tile = min(q_tile, k_tile)
    queries = _cut(call.queries, 1 if few else size, pieces, q_tile)
    keys = _cut(call.keys, size, pieces, k_tile)
    hops = 0 if few else size - 1
    if reach is not None:
        hops = min(hops, -(-(reach - 1) // keys.local))
    return Ring(settings.axis if size > 1 else None, size, hops, few, balanced, queries, keys)


def ring_size(call: Call) -> int:
    """How many devices a ring has; one without a mesh, or without its axis."""
    if call.placement is None or not call.settings.sharded:
        return 1
    return call.placement.mesh.shape.get(call.settings.axis, 1)


def reach_of(call: Call) -> int | None:
    """How many keys, its own and those right before it, a query sees at most; None if unknown."""
    mask = call.mask
    limits = [n for n in (mask.window, mask.chunk) if n]
    known = call.aligned and mask.causal and not mask.prefix
    return min(limits) if limits and known else None


def _cut(length: int, devices: int, pieces: int, tile: int) -> Cut:
    """Equal tiles, no longer than `tile`, with as little padding as that allows."""
    piece = -(-length // (devices * pieces))
    tiles = -(-piece // tile)
    return Cut(-(-piece // tiles), tiles * pieces)


def padded(x: jax.Array, axis: int, length: int, mode: str = "constant") -> jax.Array:
    """Longer by zeros, or by its last entry (`edge`)."""
    more = [(0, 0)] * x.ndim
    more[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, more, mode=mode) if more[axis][1] else x


def filled(
    q: jax.Array, k: jax.Array, v: jax.Array, scene: Scene, extras: Extras, T: int, S: int
) -> tuple[jax.Array, jax.Array, jax.Array, Scene, Extras]:
    """Everything for T queries and S keys; those that are new are not kept."""
    maybe = lambda x, length: None if x is None else padded(x, x.ndim - 1, length, "edge")
    keep, missing = scene.keep, S - k.shape[1]
    if missing and keep is None:
        keep = jnp.ones(k.shape[:2], bool)
    scene = dataclasses.replace(
        scene,
        q_slots=maybe(scene.q_slots, T),
        k_slots=maybe(scene.k_slots, S),
        keep=None if keep is None else padded(keep, 1, S),
        q_segments=maybe(scene.q_segments, T),
        k_segments=maybe(scene.k_segments, S),
    )
    if extras.bias is not None:
        extras = dataclasses.replace(extras, bias=padded(padded(extras.bias, 2, T), 3, S))
    return padded(q, 1, T), padded(k, 1, S), padded(v, 1, S), scene, extras


def exchanged(x: Any, axis: int, ring: Ring, back: bool = False) -> Any:
    """Give each device its early and its late piece of a sequence that lies in order, or `back`.

    Two point-to-point exchanges: of all pieces with even numbers, and of those with odd ones.
    """
    if not ring.balanced or x is None:
        return x
    last = 2 * ring.size - 1
    halves = []
    for odd, half in enumerate(jnp.split(x, 2, axis)):
        pieces = [(device, 2 * device + odd) for device in range(ring.size)]
        routes = [(device, min(piece, last - piece)) for device, piece in pieces]
        routes = [(to, start) for start, to in routes] if back else routes
        halves.append(jax.lax.ppermute(half, ring.axis, routes))
    return jnp.concatenate(halves, axis)


def hidden(mask: Mask, scene: Scene) -> jax.Array:
    """Whether no query sees any key, as far as the ends of a tile tell: quick, and never wrongly
    True.
    """
    k, keep = scene.k_slots, True if scene.keep is None else scene.keep
    queries = scene.q_slots.min(), scene.q_slots.max()
    keys = jnp.where(keep, k, FAR).min(), jnp.where(keep, k, -FAR).max()
    prefix = scene.prefix.max() if mask.prefix and scene.prefix is not None else None
    away = apart(mask, queries, keys, prefix)
    if scene.q_segments is not None and scene.k_segments is not None:
        q, k = scene.q_segments, scene.k_segments
        away = away | (q.min() > k.max()) | (k.min() > q.max())
    return away


def apart(mask: Mask, q: tuple[Any, Any], k: tuple[Any, Any], prefix: Any = None) -> Any:
    """Whether no slot in q[0]..q[1] sees one in k[0]..k[1]."""
    away = k[0] > k[1]
    if mask.causal:
        away = away | (k[0] > q[1])
    if mask.window:
        away = away | (q[0] - k[1] >= mask.window + (not mask.causal))
        away = away | (k[0] - q[1] > mask.window)
    if mask.chunk:
        first, last = (tuple(end // mask.chunk for end in ends) for ends in (q, k))
        away = away | (first[0] > last[1]) | (last[0] > first[1])
    return away if prefix is None else away & ((q[0] >= prefix) | (k[0] >= prefix))


def work(call: Call, ring: Ring) -> list[list[tuple[int, int]]]:
    """For each device the pairs (query tile, key tile) of an aligned sequence that it computes."""
    tile, done = ring.queries.tile, []

    def sees(q: int, k: int) -> bool:
        last = lambda number: min((number + 1) * tile, call.queries) - 1
        # Queries that fill up a tile stand where the last one stands; keys that do are not kept.
        queries, keys = (min(q * tile, last(q)), last(q)), (k * tile, last(k))
        return not apart(call.mask, queries, keys)

    for device in range(ring.size):
        owners = [(device - hop) % ring.size for hop in range(ring.hops + 1)]
        pairs = [(q, k) for o in owners for q in ring.held(device) for k in ring.held(o)]
        done.append([pair for pair in pairs if sees(*pair)])
    return done

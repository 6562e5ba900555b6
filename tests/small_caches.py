"""Small caches of one layer, and tokens for them: B=2, K=2, H=8."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.attention import Scene
from flaxen.cache import Cache, CacheSettings, Order, described, empty, keys_and_values, latents

LAYOUTS = ["dense", "ring", "paged", "latent"]
CODECS = [None, "int8", "int4", "fp8"]
WINDOW = 4


def cache(layout: str, codec: str | None = None, length: int = 12, placement: Any = None) -> Cache:
    """Keys and values have 8 and 6 channels; a ring is 4 wide, pages are 4 long."""
    kind = "dense" if layout == "latent" else layout
    settings = CacheSettings(layout=kind, codec=codec, page_size=4)
    order = Order(2, length, np.float32, settings, placement)
    if layout == "latent":
        return empty(described(order, [latents(order, 6, 8)]))
    return empty(described(order, [keys_and_values(order, 2, 8, 6, WINDOW)]))


def tokens(layout: str, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """What `append` takes, with an outlier channel."""
    draw = np.random.default_rng(seed).normal
    if layout == "latent":
        first, second = draw(size=(2, count, 6)), draw(size=(2, count, 8))
    else:
        first, second = draw(size=(2, count, 2, 8)), draw(size=(2, count, 2, 6))
    first[..., 3] *= 100
    return first.astype(np.float32), second.astype(np.float32)


@jax.jit
def appended(cache: Cache, new: Any, valid: Any) -> Cache:
    """The cache with new tokens in its only layer."""
    cache, at = cache.advance(jnp.asarray(valid))
    layer = cache.layers[0].append(*new, at)
    return Cache(
        layers=[layer],
        index=cache.index,
        keep=cache.keep,
        lengths=cache.lengths,
        pages=cache.pages,
    )


@jax.jit
def _contents(cache: Cache) -> Any:
    cache, at = cache.advance(jnp.zeros((len(cache.lengths), 1), bool))
    layer = cache.layers[0]
    scene = layer.seen(Scene(q_slots=at.positions, k_slots=at.positions), at)
    return jnp.broadcast_to(scene.k_slots, scene.keep.shape), scene.keep, layer.read(at, "float32")


def row(cache: Cache, number: int) -> list[np.ndarray]:
    """Positions, keys and values of a row's real tokens, in the order in which they are stored."""
    slots, keep, vectors = jax.device_get(_contents(cache))
    return [x[number][keep[number]] for x in (slots, *vectors)]


def bits(cache: Cache) -> list[bytes]:
    """All that is stored, page by page where there are pages, as bytes."""
    layers = cache.layers
    if cache.pages is not None:
        table = np.asarray(cache.pages.table)
        layers = jax.tree.map(lambda x: np.asarray(x)[table[table >= 0]], layers)
    shared = (cache.index, cache.keep, cache.lengths)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves((layers, shared))]


advance = jax.jit(lambda cache, valid: cache.advance(valid)[1].room)
"""Whether there is room for tokens."""

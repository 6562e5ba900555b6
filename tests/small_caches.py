"""Small caches of one layer, and tokens for them: B=2, K=2, H=8."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.cache import Cache, CacheSettings, Order, described, empty, keys_and_values, latents

LAYOUTS = ["dense", "ring", "paged", "latent"]
CODECS = [None, "int8", "int4", "fp8"]
WINDOW = 4


def cache(layout: str, codec: str | None = None, length: int = 12, batch: int = 2) -> Cache:
    """Keys and values have 8 and 6 channels; a ring is 4 wide, pages are 4 long."""
    kind = "dense" if layout == "latent" else layout
    settings = CacheSettings(layout=kind, codec=codec, page_size=4)
    order = Order(batch, length, np.float32, settings)
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


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]

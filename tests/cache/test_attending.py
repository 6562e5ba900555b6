"""What attention sees is what the codec leaves of each key and value, wherever it is stored."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_caches as caches

from flaxen.attention import Mask, Scene, visible
from flaxen.cache import codec_for

VALID = np.ones((2, 14), bool)
VALID[0, [0, 1, 6, 11, 13]] = False
PIECES = [(0, 1), (1, 2), (2, 3), (3, 8), (8, 9), (9, 14)]


@jax.jit
def step(cache, q, k, v, valid):
    """(B, T, K, H) each -> the cache, and attention with the window of a ring."""
    cache, at = cache.advance(valid)
    slots = jnp.cumsum(cache.keep, 1) - 1
    scene = Scene(q_slots=at.positions, k_slots=slots, keep=cache.keep)
    layer, k, v, scene = cache.layers[0].remember(k, v, at, scene)
    see = visible(Mask(window=caches.WINDOW), scene)[:, None]
    k, v = (jnp.where(see.any((1, 2))[:, :, None, None], x, 0) for x in (k, v))
    p = jnp.exp(jnp.einsum("BTNH,BSNH->BNTS", q, k) / 100)
    p = jnp.where(see, p, 0)
    y = jnp.einsum("BNTS,BSNH->BTNH", p / (p.sum(-1, keepdims=True) + 1e-30), v)
    return dataclasses.replace(cache, layers=[layer]), y


@pytest.mark.parametrize("codec", caches.CODECS)
@pytest.mark.parametrize("layout", ["dense", "ring", "paged"])
def test_padded_rows_in_pieces_see_what_plain_attention_sees(layout, codec):
    k, v = caches.tokens(layout, 14)
    q = np.random.default_rng(1).normal(size=k.shape).astype(np.float32)
    cache = caches.cache(layout, codec, 16)
    dirty = lambda x: jnp.full_like(x, np.nan) if x.dtype == np.float32 else x + 5
    cache = dataclasses.replace(cache, layers=jax.tree.map(dirty, cache.layers))
    got = []
    for a, b in PIECES:
        cache, y = step(cache, *(x[:, a:b] for x in (q, k, v, VALID)))
        got.append(y)
    got = np.concatenate(got, 1)

    rule = codec_for(codec, np.float32)
    k, v = (
        np.asarray(rule.decode(rule.encode(jnp.asarray(x)), "float32"), np.float64) for x in (k, v)
    )
    for row in range(2):
        real = np.flatnonzero(VALID[row])
        for i, t in enumerate(real):
            seen = real[max(0, i + 1 - caches.WINDOW) : i + 1]
            p = np.exp(np.einsum("NH,SNH->NS", q[row, t], k[row, seen]) / 100)
            want = np.einsum("NS,SNH->NH", p / p.sum(-1, keepdims=True), v[row, seen])
            np.testing.assert_allclose(got[row, t], want, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("codec", caches.CODECS)
def test_a_fresh_prompt_too_sees_what_is_stored(codec):
    k, v = (jnp.asarray(x) for x in caches.tokens("dense", 3))
    cache, at = caches.cache("dense", codec).advance(jnp.ones((2, 3), bool))
    scene = Scene(q_slots=at.positions, k_slots=at.positions, aligned=True)
    layer, *seen, after = cache.layers[0].remember(k, v, at, scene)
    assert after is scene
    for x, y in zip(seen, layer.keys(), strict=True):
        np.testing.assert_array_equal(x, y[:, :3])

"""Latent attention and a gated recurrence on their caches, against plain NumPy.

B batch, T queries, S keys, N heads, H head_dim, R rank.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.cache import CODECS, CacheSettings, Order, codec_for, described, empty, latents, states

ALL = [None, *CODECS]
DRAW = np.random.default_rng(0).normal
PIECES = [(0, 4), (4, 5), (5, 6)]


def order(codec: str | None) -> Order:
    return Order(2, 8, np.float32, CacheSettings(codec=codec))


def stored(codec: str | None, x: np.ndarray) -> np.ndarray:
    """What a codec leaves of vectors."""
    rule = codec_for(codec, np.float32)
    return np.asarray(rule.decode(rule.encode(jnp.asarray(x, jnp.float32)), np.float32))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("codec", ALL)
def test_latent_attention(codec):
    """Every head's keys and values are made of the same stored vector; queries are taken to it."""
    q, q_rope, up = DRAW(size=(2, 6, 3, 5)), DRAW(size=(2, 6, 3, 4)), DRAW(size=(3, 5, 6))
    latent, rope = DRAW(size=(2, 6, 6)), DRAW(size=(2, 6, 4))
    latent[..., 2] *= 100

    @jax.jit
    def step(cache, start, q, q_rope, latent, rope):
        cache, at = cache.advance(jnp.ones(q.shape[:2], bool))
        layer = cache.layers[0].append(latent, rope, at)
        c, r = layer.keys()
        c, r = (jnp.where(cache.keep[..., None], x, 0) for x in (c, r))
        scores = jnp.einsum("BTNH,NHR,BSR->BNTS", q, up, c)
        scores = scores / 100 + jnp.einsum("BTNH,BSH->BNTS", q_rope, r)
        see = jnp.arange(8) <= start + jnp.arange(q.shape[1])[:, None]
        p = jax.nn.softmax(jnp.where(see, scores, -jnp.inf), -1)
        mixed = jnp.einsum("BNTS,BSR->BTNR", p, c)
        return dataclasses.replace(cache, layers=[layer]), mixed

    cache = empty(described(order(codec), [latents(order(codec), 6, 4)]))
    dirty = lambda x: jnp.full_like(x, np.nan) if x.dtype == np.float32 else x + 5
    cache = dataclasses.replace(cache, layers=jax.tree.map(dirty, cache.layers))
    got = []
    for a, b in PIECES:
        cache, y = step(
            cache, a, *(x[:, a:b].astype(np.float32) for x in (q, q_rope, latent, rope))
        )
        got.append(y)

    c, r = stored(codec, latent).astype(np.float64), stored(codec, rope).astype(np.float64)
    scores = np.einsum("BTNH,NHR,BSR->BNTS", q, up, c) / 100
    scores += np.einsum("BTNH,BSH->BNTS", q_rope, r)
    p = softmax(np.where(np.tri(6, dtype=bool), scores, -np.inf))
    want = np.einsum("BNTS,BSR->BTNR", p, c)
    np.testing.assert_allclose(np.concatenate(got, 1), want, atol=2e-4)


@pytest.mark.parametrize("codec", ALL)
def test_a_gated_recurrence_over_padded_rows(codec):
    """state = gate * state + input, over a convolution of the last three inputs."""
    x, gate = DRAW(size=(2, 6, 4)), 1 / (1 + np.exp(-DRAW(size=(2, 6, 4))))
    valid = np.array([[False, True, True, True, True, False], [True] * 6])
    taps = np.array([[0.5, 1, 2], [1, -1, 0], [2, 0.25, -1]])

    @jax.jit
    def step(cache, x, gate, valid):
        cache, at = cache.advance(valid)
        (conv,), state = cache.layers[0].states()
        for t in range(x.shape[1]):
            real = valid[:, t, None, None]
            conv = jnp.where(real, jnp.concatenate([conv[..., 1:], x[:, t, :, None]], -1), conv)
            inputs = (conv @ taps)[:, :, None] * jnp.ones((1, 1, 2, 1))
            state = jnp.where(real[..., None], gate[:, t, :, None, None] * state + inputs, state)
        return dataclasses.replace(
            cache, layers=[cache.layers[0].append((conv,), state, at)]
        ), state

    channels = {"mlp": 4, "kernel": 3}
    layer = states(order(codec), [channels], {"heads": 4, "head_dim": 2, "state": 3})
    cache = empty(described(order(codec), [layer]))
    assert cache.endless
    assert cache.layers[0].state.dtype == np.float32
    before, got = cache.layers[0], np.zeros(0)
    for a, b in PIECES:
        before = cache.layers[0]
        cache, got = step(cache, *(y[:, a:b].astype(np.float32) for y in (x, gate)), valid[:, a:b])
    pairs = list(zip(*map(jax.tree.leaves, (before, cache.layers[0])), strict=True))
    # The last piece of row 0 is padding.
    assert [(old[0] == new[0]).all() for old, new in pairs] == [True] * len(pairs)
    assert any((old[1] != new[1]).any() for old, new in pairs)

    conv, state = np.zeros((2, 4, 3)), np.zeros((2, 4, 2, 3))
    for a, b in PIECES:
        for t, row in ((t, row) for t in range(a, b) for row in range(2) if valid[row, t]):
            conv[row] = np.concatenate([conv[row, :, 1:], x[row, t, :, None]], -1)
            inputs = (conv[row] @ taps)[:, None]
            state[row] = gate[row, t, :, None, None] * state[row] + inputs
        if (a, b) != PIECES[-1]:
            # Row 0 is not stored again with the last piece: it has none.
            # States are not rounded, whatever the codec: errors would pile up.
            conv = stored(codec, conv).astype(np.float64)
    np.testing.assert_allclose(got, state, atol=1e-4 if codec is None else 2e-2)

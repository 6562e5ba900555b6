"""What a layer adds to its attention: ALiBi, sinks, dropout."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.attention import Mask, Scene
from flaxen.core.tree import is_param
from flaxen.layers.alibi import alibi_slopes
from flaxen.layers.attention import attention
from flaxen.layers.context import Context


@pytest.mark.parametrize(
    ("heads", "powers"),
    [(1, [8]), (4, [2, 4, 6, 8]), (8, range(1, 9)), (6, [2, 4, 6, 8, 1, 3])],
)
def test_slopes_are_powers_of_two_and_the_odd_ones_of_the_next_for_the_rest(heads, powers):
    np.testing.assert_allclose(alibi_slopes(heads), [2.0**-p for p in powers])


def layer(**slots):
    abstract = attention(embed=8, heads=4, kv_heads=2, head_dim=4, **slots)
    rng = np.random.default_rng(0)
    draw = lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32) if is_param(p) else p
    return jax.tree.map(draw, abstract, is_leaf=is_param)


def run(layer, key=None):
    slots = jnp.arange(5)
    scene = Scene(q_slots=slots, k_slots=slots, aligned=True)
    ctx = Context(positions=slots[None], scene=scene, rotary=(), dropout_key=key)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 5, 8)), jnp.float32)
    return np.asarray(layer(x, ctx)[0])


def test_sinks_and_slopes_change_what_a_layer_gives():
    plain = run(layer())
    sinking = dataclasses.replace(layer(), sinks=jnp.full(4, 50.0))
    np.testing.assert_allclose(run(sinking), 0, atol=1e-6)
    sloped = run(layer(slopes=alibi_slopes(4)))
    np.testing.assert_array_equal(sloped[:, 0], plain[:, 0])
    assert np.abs(sloped[:, 1:] - plain[:, 1:]).max() > 1e-3
    steep = run(layer(slopes=(1e6,) * 4))
    own = layer(mask=Mask(window=1))
    np.testing.assert_allclose(steep, run(own), atol=1e-5)


def test_dropout_needs_a_key_and_follows_it():
    dropping = layer(dropout=0.5)
    np.testing.assert_array_equal(run(dropping), run(layer()))
    once, other = (run(dropping, jax.random.key(n)) for n in (0, 1))
    assert np.abs(once - other).max() > 1e-3
    np.testing.assert_array_equal(once, run(dropping, jax.random.key(0)))

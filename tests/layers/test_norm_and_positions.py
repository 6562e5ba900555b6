"""Layer norm and learned positions against their definitions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from flaxen.layers.alibi import alibi_slopes, mpt_slopes
from flaxen.layers.linear import PositionTable, TokenPositions
from flaxen.layers.norm import LayerNorm, OffsetLayerNorm


def test_layer_norm():
    x, w, b = np.random.default_rng(0).normal(1, 3, (3, 2, 16)).astype(np.float32)
    wide = x.astype(float)
    unit = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 0.1)
    got = LayerNorm(weight=jnp.asarray(w[0]), bias=jnp.asarray(b[0]), eps=0.1)(jnp.asarray(x))
    np.testing.assert_allclose(got, unit * w[0] + b[0], atol=1e-5)


def test_layer_norm_rounds_to_sixteen_bits_once():
    """1 + 2**-8 is lost if weight and bias are added in bfloat16 one after the other."""
    x = jnp.asarray([[-1, 1]], jnp.bfloat16)
    sixteen = lambda *values: jnp.asarray(values, jnp.bfloat16)
    norm = LayerNorm(weight=sixteen(1.0, 1 + 2**-7), bias=sixteen(0.0, 2**-8), eps=0.0)
    want = np.float32(1 + 2**-7 + 2**-8).astype(jnp.bfloat16)
    assert norm(x)[0, 1] == want


def test_each_head_may_have_a_layer_norm_of_its_own():
    x = np.random.default_rng(1).normal(size=(2, 5, 3, 8)).astype(np.float32)
    weight = np.arange(24, dtype=np.float32).reshape(3, 8)
    got = LayerNorm(weight=jnp.asarray(weight), eps=0.0)(jnp.asarray(x))
    wide = x.astype(float)
    unit = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)
    np.testing.assert_allclose(got, unit * weight, atol=1e-4)


def test_an_offset_layer_norm_multiplies_by_one_more_than_its_weight():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, 8)).astype(np.float32))
    weight, bias = jnp.linspace(-1, 1, 8), jnp.linspace(0, 3, 8)
    want = LayerNorm(weight=1 + weight, bias=bias, eps=1e-3)(x)
    got = OffsetLayerNorm(weight=weight, bias=bias, eps=1e-3)(x)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_slopes_of_heads_that_are_no_power_of_two():
    half = 2**-0.5
    np.testing.assert_allclose(alibi_slopes(3), [2**-4, 2**-8, 2**-2], rtol=1e-12)
    np.testing.assert_allclose(mpt_slopes(3), [2**-4, 2**-8, 2**-2], rtol=1e-12)
    np.testing.assert_allclose(alibi_slopes(6)[4:], [half**2, half**6], rtol=1e-12)
    np.testing.assert_allclose(mpt_slopes(6)[:2], [2**-2, 2**-4], rtol=1e-12)
    assert mpt_slopes(4) == alibi_slopes(4)


def test_positions_that_count_tokens_skip_padding():
    keep = jnp.array([[0, 0, 1, 1], [1, 1, 1, 0]], bool)
    slots = jnp.broadcast_to(jnp.arange(4), (2, 4))
    table = TokenPositions(weight=jnp.arange(6.0)[:, None], offset=2)
    counted = table.counted(slots, keep)
    assert counted.tolist() == [[-1, -1, 0, 1], [0, 1, 2, -1]]
    assert table(counted)[..., 0].tolist() == [[1, 1, 2, 3], [2, 3, 4, 1]]
    np.testing.assert_array_equal(table.counted(slots, None), slots)
    assert jnp.isnan(table(jnp.array([[4]]))).all()


def test_there_is_no_position_past_the_last():
    table = PositionTable(weight=jnp.ones((4, 2)))
    got = np.asarray(table(jnp.array([[0, 3, 4, 9]])))
    np.testing.assert_array_equal(np.isnan(got[0, :, 0]), [False, False, True, True])

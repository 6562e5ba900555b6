"""Layer norm and learned positions against their definitions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from flaxen.layers.linear import PositionTable
from flaxen.layers.norm import LayerNorm


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


def test_there_is_no_position_past_the_last():
    table = PositionTable(weight=jnp.ones((4, 2)))
    got = np.asarray(table(jnp.array([[0, 3, 4, 9]])))
    np.testing.assert_array_equal(np.isnan(got[0, :, 0]), [False, False, True, True])

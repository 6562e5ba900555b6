"""The reference itself: gradients against finite differences, values against closed forms."""

from __future__ import annotations

import attention_reference as reference
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.attention import Call, Extras, Mask, Scene


def setting(**changes):
    T = 5
    rng = np.random.default_rng(0)
    q, k, v, w = (rng.standard_normal((2, T, n, h)) for n, h in ((4, 3), (2, 3), (2, 2), (4, 2)))
    extras = Extras(
        bias=rng.standard_normal((1, 4, T, T)), slopes=rng.random(4), sinks=rng.standard_normal(4)
    )
    call = Call(Mask(**changes), 0.7, T, T, 4, 2, 3, 2, "float64", "cpu", softcap=1.5)
    slots = jnp.arange(T)
    keep = jnp.array([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]], bool)
    segments = jnp.array([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])
    scene = Scene(q_slots=slots, k_slots=slots, keep=keep, q_segments=segments, k_segments=segments)
    return (q, k, v), call, scene, w, extras


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "slopes", "sinks"])
@pytest.mark.parametrize("changes", [{}, {"window": 2}, {"causal": False, "chunk": 2}], ids=str)
def test_gradients_are_those_of_finite_differences(name, changes):
    qkv, call, scene, w, extras = setting(**changes)
    got = reference.gradients(*qkv, call, scene, w, extras)[name]
    want = reference.finite_differences(*qkv, call, scene, w, extras, name)
    np.testing.assert_allclose(got, want, atol=1e-8)


def test_a_sink_takes_its_part_of_the_weights():
    call = Call(Mask(), 1.0, 1, 2, 1, 1, 1, 1, "float64", "cpu")
    scene = Scene(q_slots=jnp.array([1]), k_slots=jnp.arange(2))
    zero, one = np.zeros((1, 2, 1, 1)), np.ones((1, 2, 1, 1))
    extras = Extras(sinks=jnp.zeros(1))
    assert reference.attention(zero[:, :1], zero, one, call, scene, extras) == pytest.approx(2 / 3)

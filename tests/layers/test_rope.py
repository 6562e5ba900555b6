"""Frequencies against closed forms, and what rotation leaves alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.core.errors import ConfigError
from flaxen.layers.rope import ROPE_TYPES, rope, rotate


def frequencies(length=1, **parameters):
    r = rope({"rope_theta": 1e4, **parameters}, head_dim=8, max_positions=16)
    inv, scale = ROPE_TYPES[r["rope_type"]](r, jnp.int32(length))
    return np.asarray(inv), scale


def test_default():
    np.testing.assert_allclose(frequencies()[0], [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear_divides_by_the_factor():
    inv, _ = frequencies(rope_type="linear", factor=4.0)
    np.testing.assert_allclose(inv, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6)


def test_dynamic_grows_the_base_past_the_trained_length_only():
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    np.testing.assert_allclose(
        frequencies(32, **dynamic)[0], [1, 0.069336, 0.0048075, 0.00033333], rtol=1e-4
    )
    np.testing.assert_allclose(frequencies(16, **dynamic)[0], [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_llama3_stretches_long_waves():
    inv, scale = frequencies(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    np.testing.assert_allclose(inv, [1, 0.0130423, 0.00125, 0.000125], rtol=1e-5)
    assert scale == 1


def test_yarn_sharpens_attention_unless_told_how_much():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert frequencies(**yarn)[1] == pytest.approx(1.138629, rel=1e-6)
    assert frequencies(**yarn, attention_factor=1.0)[1] == 1.0


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 2.0, 4.0, 8.0],
    "long_factor": [10.0, 10.0, 10.0, 10.0],
    "original_max_position_embeddings": 8,
}


def test_longrope_takes_other_factors_past_the_first_length():
    short, long = [1, 0.05, 0.0025, 0.000125], [0.1, 0.01, 0.001, 0.0001]
    np.testing.assert_allclose(frequencies(8, **LONGROPE)[0], short, rtol=1e-6)
    np.testing.assert_allclose(frequencies(9, **LONGROPE)[0], long, rtol=1e-6)


def test_longrope_sharpens_attention_by_how_much_longer_it_got():
    """sqrt(1 + log(16 / 8) / log(8)) here, unless told."""
    assert frequencies(**LONGROPE)[1] == pytest.approx((1 + 1 / 3) ** 0.5)
    assert frequencies(**LONGROPE, factor=1.0)[1] == 1.0
    assert frequencies(**LONGROPE, attention_factor=1.5)[1] == 1.5


def test_longrope_has_a_factor_for_each_pair_of_channels():
    with pytest.raises(ConfigError, match="long_factor has 3 numbers; 8 channels need 4"):
        frequencies(**LONGROPE | {"long_factor": [1.0] * 3})
    with pytest.raises(ConfigError, match="short_factor is .*above 0"):
        frequencies(**LONGROPE | {"short_factor": [1.0, 1.0, 0.0, 1.0]})


def test_partial_rotation_leaves_the_rest_untouched():
    r = rope({"rope_theta": 1e4, "partial_rotary_factor": 0.25}, head_dim=16, max_positions=64)
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 16)).astype(np.float32)
    cos, sin = r.tables(jnp.array([[0, 1, 5]]))
    y = np.asarray(rotate(x, cos, sin))
    np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
    angle = 5 * np.array([1.0, 1e4**-0.5])
    a, b = x[0, 2, 0, :2], x[0, 2, 0, 2:4]
    np.testing.assert_allclose(y[0, 2, 0, :2], a * np.cos(angle) - b * np.sin(angle), atol=1e-6)
    np.testing.assert_allclose(y[0, 2, 0, 2:4], b * np.cos(angle) + a * np.sin(angle), atol=1e-6)


def test_interleaved_pairs_neighbours():
    r = rope({"rope_theta": 1e4}, head_dim=4, max_positions=64, interleaved=True)
    x = np.array([1.0, 2.0, 3.0, 4.0], np.float32).reshape(1, 1, 1, 4)
    cos, sin = r.tables(jnp.array([[7]]))
    got = np.asarray(rotate(x, cos, sin, interleaved=True)).ravel()
    want = []
    for (a, b), f in zip([(1, 2), (3, 4)], [1.0, 0.01], strict=True):
        want += [a * np.cos(7 * f) - b * np.sin(7 * f), b * np.cos(7 * f) + a * np.sin(7 * f)]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_positions_stay_apart_in_bfloat16():
    """In bfloat16 256 and 257 are the same number, so angles must not be made of it."""
    r = rope({"rope_theta": 1e4}, head_dim=8, max_positions=8192)
    positions = jnp.array([[255, 256, 257, 4095]])
    x = jnp.ones((1, 4, 1, 8), jnp.bfloat16)
    got = np.asarray(rotate(x, *r.tables(positions)).astype(jnp.float32))[0, :, 0]
    angle = np.asarray(positions)[0, :, None] * 1e4 ** -(np.arange(0, 8, 2) / 8)
    want = np.concatenate([np.cos(angle) - np.sin(angle), np.cos(angle) + np.sin(angle)], -1)
    np.testing.assert_allclose(got, want, atol=1e-2)
    assert not np.array_equal(got[1], got[2])


def test_an_unknown_type_names_the_known_ones():
    with pytest.raises(ConfigError, match="Unknown rope_type 'lama3'. Did you mean 'llama3'"):
        frequencies(rope_type="lama3")


def test_missing_fields_are_named():
    with pytest.raises(ConfigError, match="lacks factor"):
        frequencies(rope_type="linear")

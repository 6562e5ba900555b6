"""Frequencies against closed forms, and what rotation leaves alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.core.errors import ConfigError
from flaxen.layers.rope import ROPE_TYPES, layer_rope, rope, rotate


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


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_llama3_stretches_long_waves():
    inv, scale = frequencies(**LLAMA3)
    np.testing.assert_allclose(inv, [1, 0.0130423, 0.00125, 0.000125], rtol=1e-5)
    assert scale == 1


def test_llama3_is_right_far_past_the_length_of_pretraining():
    """No table ends there: position 640 turns ten times as far as position 64."""
    r = rope({"rope_theta": 1e4, **LLAMA3}, head_dim=8, max_positions=16)
    positions = np.array([[63, 64, 65, 640, 6400]])
    cos, sin = r.tables(jnp.asarray(positions))
    part = (64 * 0.1 / (2 * np.pi) - 1) / 3
    inv = np.array([1, (1 - part) * 0.1 / 8 + part * 0.1, 0.01 / 8, 0.001 / 8])
    np.testing.assert_allclose(cos, np.cos(positions[..., None] * inv), atol=1e-4)
    np.testing.assert_allclose(sin, np.sin(positions[..., None] * inv), atol=1e-4)


def test_far_positions_are_as_exact_as_float32_angles_are():
    """A frequency and an angle are each rounded once: 2 ** -24 of the angle, and some for pow."""
    r = rope({"rope_theta": 5e5}, head_dim=128, max_positions=16)
    positions = np.array([[4095, 131071, 1048576, 2**24 - 1]])
    inv = 5e5 ** -(np.arange(0, 128, 2, dtype=np.float64) / 128)
    angle = positions[..., None] * inv
    for table, exact in zip(r.tables(jnp.asarray(positions)), (np.cos, np.sin), strict=True):
        assert table.dtype == np.float32
        assert (np.abs(table - exact(angle)) <= 4 * 2.0**-24 * angle + 1e-6).all()


def test_yarn_is_neither_longrope_nor_none_and_dynamic_is_not_none():
    old = {"original_max_position_embeddings": 8}
    scaled = {
        "none": frequencies(32),
        "dynamic": frequencies(32, rope_type="dynamic", factor=2.0),
        "yarn": frequencies(32, rope_type="yarn", factor=2.0, **old),
        "longrope": frequencies(32, **LONGROPE),
    }
    assert len({tuple(inv.tolist()) for inv, _ in scaled.values()}) == 4
    assert scaled["yarn"][1] != scaled["longrope"][1]


def test_proportional_turns_the_first_pairs_as_if_all_did():
    r = rope({"rope_theta": 1e4, "rope_type": "proportional", "partial_rotary_factor": 0.5}, 8, 16)
    np.testing.assert_allclose(r.frequencies()[0], [1, 0.1, 0, 0], rtol=1e-6)
    x = np.arange(8, dtype=np.float32).reshape(1, 1, 1, 8)
    y = rotate(x, *r.tables(jnp.array([[3]])))
    np.testing.assert_array_equal(np.asarray(y)[..., [2, 3, 6, 7]], x[..., [2, 3, 6, 7]])


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


def test_a_field_that_nothing_reads_is_refused():
    with pytest.raises(ConfigError, match="atention_factor=2.0, which nothing reads. Did you mean"):
        frequencies(**LONGROPE, atention_factor=2.0)


def test_a_field_of_another_type_is_named_and_not_used():
    """Transformers computes without it too."""
    with pytest.warns(match="type 'linear' do not use beta_fast"):
        inv, _ = frequencies(rope_type="linear", factor=4.0, beta_fast=1)
    np.testing.assert_allclose(inv, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6)


def test_a_registered_type_reads_what_it_wants():
    ROPE_TYPES.register("halved", lambda r, length: (r.base() * r["share"], 1.0))
    try:
        np.testing.assert_allclose(frequencies(rope_type="halved", share=0.5)[0][0], 0.5)
    finally:
        del ROPE_TYPES._entries["halved"]


def test_older_names():
    old = rope({"type": "su", "rope_theta": 1e4, **LONGROPE, "rope_type": None}, 8, 16)
    assert old.kind == "longrope"
    assert rope({"type": "linear", "factor": 2.0, "rope_theta": 1e4}, 8, 16).kind == "linear"


def test_yarn_takes_the_growth_of_the_length_where_its_factor_is_null():
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 4}
    (got, gain), (want, same) = (frequencies(**yarn, factor=f) for f in (None, 4.0))
    np.testing.assert_array_equal(got, want)
    assert gain == same
    with pytest.raises(ConfigError, match="lacks factor"):
        frequencies(**yarn)


PER_LAYER = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "chunked_attention": None,
}


def test_each_layer_type_has_a_rope_of_its_own_or_none():
    one = lambda kind: layer_rope(PER_LAYER, kind, 8, 64)
    assert one("full_attention")["rope_theta"] == 1e6
    assert one("sliding_attention")["rope_theta"] == 1e4
    assert one("chunked_attention") is None
    with pytest.raises(ConfigError, match="no entry for 'linear_attention' layers; found chunked"):
        one("linear_attention")
    same = PER_LAYER["sliding_attention"]
    assert layer_rope(same, "full_attention", 8, 64) == rope(same, 8, 64)


def test_truncate_counts_only_where_transformers_reads_it():
    """It looks at the outermost level, where nested settings do not have it."""
    nested = layer_rope(PER_LAYER, "full_attention", 64, 64).frequencies()[0]
    flat = PER_LAYER["full_attention"]
    untruncated = rope(flat, 64, 64).frequencies()[0]
    truncated = rope({k: v for k, v in flat.items() if k != "truncate"}, 64, 64).frequencies()[0]
    np.testing.assert_array_equal(nested, truncated)
    assert (nested != untruncated).any()


@pytest.mark.parametrize(
    ("fields", "head_dim", "words"),
    [
        ({}, 7, "7 of 7 channels"),
        ({"rope_type": "axial"}, 6, "multiple of 4"),
        ({"rope_type": "dynamic", "factor": 2.0}, 2, "more than one pair"),
        ({"partial_rotary_factor": 1.5}, 8, "from 0 to 1"),
        ({"partial_rotary_factor": 0.0}, 8, "0 of 8 channels"),
        ({"rope_type": ["linear"]}, 8, "Unknown rope_type"),
        ({**LONGROPE, "original_max_position_embeddings": 1}, 8, "no finite"),
        ({"type": "linear", "rope_type": "yarn"}, 8, "type='linear' and rope_type='yarn'"),
    ],
)
def test_what_makes_no_rotation_is_refused(fields, head_dim, words):
    with pytest.raises(ConfigError, match=words):
        rope({"rope_theta": 1e4, **fields}, head_dim, 16)


def test_an_odd_part_of_a_head_turns_the_pair_that_it_cuts():
    """As Transformers: three of ten channels are two pairs, with exponents of thirds."""
    r = rope({"rope_theta": 1e3, "partial_rotary_factor": 0.3}, head_dim=10, max_positions=16)
    np.testing.assert_allclose(r.frequencies()[0], [1, 1e-2], rtol=1e-6)

"""Tokens with several positions, against Transformers on torch: Qwen2-VL, Qwen3-VL and vision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import DATA

from flaxen.core.errors import ConfigError, InputError
from flaxen.layers.rope import rope
from flaxen.layers.rope_axes import grid_positions

A = np.load(DATA / "unit" / "rope_axes.npz")
ROPES = {
    "sections": {"mrope_section": [2, 3, 3]},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mrope_section": [2, 3, 3],
    },
    "turns": {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
}


def made(**fields):
    return rope({"rope_theta": 1e4, **fields}, head_dim=16, max_positions=256)


def equal(tables, name):
    for table, part in zip(tables, ("cos", "sin"), strict=True):
        want = A[f"{name}/{part}"]
        half = want.shape[-1] // 2
        np.testing.assert_array_equal(want[..., :half], want[..., half:])
        np.testing.assert_allclose(
            table.reshape(*want.shape[:-1], half), want[..., :half], atol=1e-4
        )


@pytest.mark.parametrize("name", ROPES)
def test_time_row_and_column(name):
    equal(jax.jit(made(**ROPES[name]).tables)(A["positions"]), name)


@pytest.mark.parametrize("name", ROPES)
def test_text_turns_as_without_sections(name):
    plain = {k: v for k, v in ROPES[name].items() if not k.startswith("mrope")}
    text = jnp.asarray(A["positions"][0])
    for got, want in zip(made(**ROPES[name]).tables(text), made(**plain).tables(text), strict=True):
        np.testing.assert_array_equal(got, want)


def test_mrope_is_a_name_of_the_default_frequencies():
    named = made(rope_type="mrope", mrope_section=[2, 3, 3])
    equal(named.tables(A["positions"]), "sections")
    with pytest.raises(ConfigError, match="'mrope' lacks mrope_section"):
        made(rope_type="mrope")


def test_patches_turn_with_their_row_and_their_column():
    positions = grid_positions(4, 6, merge=2)
    np.testing.assert_array_equal(positions, A["grid"].T)
    equal(made(rope_type="axial").tables(jnp.asarray(positions[:, None])), "axial")


def test_patches_row_by_row():
    np.testing.assert_array_equal(grid_positions(2, 3), [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]])
    with pytest.raises(InputError, match="3 x 4 patches has no whole blocks of 2 x 2"):
        grid_positions(3, 4, merge=2)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [({}, (3, 2, 7)), (ROPES["turns"], (2, 2, 7)), ({"rope_type": "axial"}, (2, 7)), ({}, (7,))],
)
def test_positions_of_another_number_of_axes_are_refused(fields, shape):
    with pytest.raises(InputError, match="positions have shape"):
        made(**fields).tables(jnp.zeros(shape, jnp.int32))


@pytest.mark.parametrize("sections", [[2, 3], [2, 3, 4], [4, 4, 0.0], 8, [9, 0, -1]])
def test_sections_share_out_all_pairs(sections):
    with pytest.raises(ConfigError, match="mrope_section is .*8 pairs"):
        made(mrope_section=sections)


@pytest.mark.parametrize("size", [6, 8, 10])
def test_even_frequencies_turn_with_rows_and_odd_ones_with_columns(size):
    """Pixtral's, also of an odd number of pairs."""
    turn = rope({"rope_type": "axial_in_turns", "rope_theta": 1e4}, size, 0)
    cos, sin = turn.tables(jnp.array([[[3, 5]], [[7, 2]]]))
    inv = 1e4 ** (-np.arange(0, size, 2) / size)
    row, column = np.array([[3.0], [5.0]]), np.array([[7.0], [2.0]])
    angle = np.concatenate([row * inv[::2], column * inv[1::2]], -1)
    np.testing.assert_allclose(cos[0], np.cos(angle), atol=1e-6)
    np.testing.assert_allclose(sin[0], np.sin(angle), atol=1e-6)

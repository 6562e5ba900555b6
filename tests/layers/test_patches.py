"""Patches of pictures, and positions for other grids."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.layers.patches import (
    GridPositions,
    Patches,
    antialiased,
    cubic,
    cut,
    flat_patches,
    patches,
)


def test_patches_are_a_convolution_whose_stride_is_its_kernel():
    rng = np.random.default_rng(0)
    pixels = jnp.asarray(rng.normal(size=(2, 3, 9, 13)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(5, 3, 2, 4)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=5), jnp.float32)
    got = Patches(weight=weight, bias=bias)(pixels)
    want = jax.lax.conv_general_dilated(pixels, weight, (2, 4), "VALID") + bias[:, None, None]
    np.testing.assert_allclose(got, want.reshape(2, 5, -1).swapaxes(1, 2), atol=1e-4)
    assert cut(pixels, (2, 4)).shape == (2, 4 * 3, 24)


def test_abstract_patches_have_the_axes_of_their_file():
    assert patches(8, 3, (4, 2)).weight.shape == (8, 3, 4, 2)
    flat = flat_patches(8, 3, (4, 2), frames=2)
    assert flat.weight.shape == (8, 3, 2, 4, 2) and flat.width == 48


def test_resampling_keeps_what_is_even_and_what_fits():
    for way in (cubic, antialiased):
        np.testing.assert_allclose(way(7, 4).sum(1), 1, atol=1e-6)
        np.testing.assert_allclose(way(4, 9).sum(1), 1, atol=1e-6)
        np.testing.assert_allclose(way(5, 5), np.eye(5), atol=1e-6)


def test_leading_positions_stay():
    table = jnp.arange(10.0).reshape(5, 2)
    part = GridPositions(weight=table, grid=(2, 2), leading=1)
    np.testing.assert_array_equal(part((2, 2)), table)
    wider = part((2, 3))
    assert wider.shape == (7, 2)
    np.testing.assert_array_equal(wider[0], table[0])
    np.testing.assert_allclose(wider[1:].mean(0), table[1:].mean(0), atol=1e-5)

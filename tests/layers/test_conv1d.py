"""Conv1D against torch's, and what a fresh one is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from golden import DATA

from flaxen.core.tree import is_param, paths
from flaxen.fresh import initial
from flaxen.layers.conv1d import Conv1D, conv1d

A = np.load(DATA / "unit" / "misc.npz")


def part() -> Conv1D:
    return Conv1D(weight=jnp.asarray(A["conv1d/w"]), bias=jnp.asarray(A["conv1d/b"]))


def test_equals_torch():
    np.testing.assert_allclose(part()(A["conv1d/x"]), A["conv1d/y"], rtol=1e-6, atol=1e-6)


def test_the_gradient_of_the_weight_lies_as_the_weight():
    grad = jax.grad(lambda p: part().__class__(**p)(A["conv1d/x"]).sum())
    got = grad({"weight": A["conv1d/w"], "bias": A["conv1d/b"]})["weight"]
    want = np.tile(A["conv1d/x"].astype(np.float64).sum((0, 1))[:, None], (1, 5))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_repr():
    assert repr(part()) == "Conv1D(nf=5, nx=3)"


def test_fresh():
    fresh = {p: np.asarray(initial(p, w)) for p, w in paths(conv1d(300, 200), is_param).items()}
    assert fresh["weight"].shape == (200, 300)
    assert abs(fresh["weight"].std() - 0.02) < 3e-4
    np.testing.assert_array_equal(fresh["bias"], np.zeros(300))

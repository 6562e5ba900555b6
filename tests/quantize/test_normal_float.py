"""Weights as 4-bit normal floats: the paper's levels, the nearest of them, products, adapters."""

from __future__ import annotations

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import flaxen
from flaxen.convert.arrays import ArrayTensor
from flaxen.core.dot import dot, rows
from flaxen.core.errors import CheckpointError, ConfigError
from flaxen.quantize import NormalFloat, RoundedWeight
from flaxen.quantize.normal_float import LEVELS
from flaxen.quantize.rounded import rounded_weight
from flaxen.quantize.rounded_tensors import rounded_parts

W = np.random.default_rng(0).normal(size=(6, 128)).astype(np.float32)
W[2, :64] = 0


def nearest(w: np.ndarray, group: int) -> np.ndarray:
    """Each weight as the nearest level times the largest magnitude of its group, in float64."""
    groups = w.reshape(len(w), -1, group).astype(np.float64)
    top = np.abs(groups).max(-1, keepdims=True)
    top = np.where(top > 0, top, 1)
    at = np.abs(groups[..., None] / top[..., None] - LEVELS.astype(np.float64)).argmin(-1)
    return (LEVELS.astype(np.float64)[at] * top).reshape(w.shape)


def leaf(w: np.ndarray = W) -> RoundedWeight:
    how = NormalFloat().fitted(*w.shape)
    parts = {k: jnp.asarray(x.read()) for k, x in rounded_parts(ArrayTensor(w), how).items()}
    return rounded_weight(parts, how, w.shape, 1, np.dtype(np.float32), whole=True)


def test_levels_are_the_papers():
    """Quantiles of the normal distribution: 8 above zero, 7 below, zero itself, up to 1."""
    offset = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    above = norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    below = -norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate([above, below, [0.0]])) / above.max()
    np.testing.assert_allclose(LEVELS, levels, atol=2e-6)


def test_values_are_the_nearest_levels():
    """A scale is off by one part in a thousand, as it is a float16."""
    np.testing.assert_allclose(leaf().values(), nearest(W, 64), rtol=1e-3, atol=2e-3)
    assert leaf().rounding.group == 64
    assert NormalFloat().fitted(2, 96).group == 32


def test_products_and_rows_are_those_of_the_values():
    x = np.random.default_rng(1).normal(size=(3, 128)).astype(np.float32)
    values = np.asarray(leaf().values(), np.float64)
    np.testing.assert_allclose(dot(jnp.asarray(x), leaf()), x @ values.T, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(rows(leaf(), jnp.array([5, 0])), values[[5, 0]], rtol=1e-6)


def test_normal_numbers_lose_less_than_as_integers():
    from flaxen.quantize import Rounding

    w = np.random.default_rng(2).normal(size=(64, 512)).astype(np.float32)
    how = Rounding(4, 64).fitted(64, 512)
    parts = {k: jnp.asarray(x.read()) for k, x in rounded_parts(ArrayTensor(w), how).items()}
    ints = rounded_weight(parts, how, w.shape, 1, np.dtype(np.float32), whole=True)
    error = lambda one: np.square(np.asarray(one.values()) - w).mean()
    assert error(leaf(w)) < 0.9 * error(ints)


def test_adapters_go_onto_a_model_of_normal_floats(tmp_path):
    base = golden.write_folder(golden.case("llama"), tmp_path / "base")
    model = flaxen.load(base, bits="nf4")
    ids = golden.case("llama").arrays["full_input_ids"]
    held = model.module.layers[0].self_attn.q_proj.weight
    assert isinstance(held.scheme, NormalFloat)
    grown = model.add_adapter(rank=2, targets=("q_proj",), use_dora=True)
    grown = grown.replace(
        module=jax.tree.map(lambda x: x + 0.01 if x.shape[-1:] == (2,) else x, grown.module)
    )
    merged = grown.merge_adapters()
    np.testing.assert_allclose(merged(ids).logits, grown(ids).logits, atol=5e-5)
    with pytest.raises(CheckpointError, match="GPTQ has integers alone"):
        model.save(tmp_path / "out", quantize="gptq")


def test_other_bits_are_refused():
    with pytest.raises(ConfigError, match="Normal floats have 4 bits"):
        NormalFloat(8)

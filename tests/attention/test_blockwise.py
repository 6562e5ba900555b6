"""Blockwise attention: memory, dropout, and what skipping blocks may not change."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES, case

from flaxen.attention import MECHANISMS, NOTHING, AttentionSettings, Blocks, Extras, Scene, tiles
from flaxen.attention.online import dropout_factors
from flaxen.attention.vanilla import weights


def temporary_bytes(mechanism, length, backward):
    """What a compiled program keeps besides its arguments and results."""
    call = case(length=1, heads=(2, 1), widths=(16, 16)).call
    call = dataclasses.replace(call, queries=length, keys=length)

    def run(q, k, v, slots):
        scene = Scene(q_slots=slots, k_slots=slots, aligned=True)
        return MECHANISMS[mechanism].attend(q, k, v, call, scene).sum()

    program = jax.jit(jax.grad(run, (0, 1, 2)) if backward else run)
    shapes = [jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (2, 1, 1)]
    slots = jax.ShapeDtypeStruct((length,), jnp.int32)
    return program.lower(*shapes, slots).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("backward", [False, True])
def test_memory_grows_with_the_length_and_that_of_vanilla_with_its_square(backward):
    sizes = [temporary_bytes("blockwise", n, backward) for n in (1024, 2048, 4096)]
    assert all(b / a <= 2.2 for a, b in itertools.pairwise(sizes)), sizes
    assert sizes[-1] < 4 * 2**20
    short, long = (temporary_bytes("vanilla", n, backward) for n in (1024, 2048))
    assert long / short > 3


@pytest.fixture(params=["written out", "looped"])
def call(request, monkeypatch):
    """A call with dropout whose keys come in several tiles when it is treated as large."""
    if request.param == "looped":
        monkeypatch.setattr(tiles, "FEW", 0)
        monkeypatch.setattr(tiles, "SMALL", 0)
    blocks = AttentionSettings(blocks=Blocks(q=4, k=3))
    return dataclasses.replace(CASES["causal"].call, dropout=0.25, settings=blocks)


def test_dropout_keeps_the_mean_and_the_backward_pass_drops_the_same(call):
    q, k, v, out_grad = map(jnp.asarray, CASES["causal"].arrays)
    scene = CASES["causal"].scene

    @jax.jit
    @jax.value_and_grad
    def loss(kv, number):
        extras = Extras(dropout_key=jax.random.key(number))
        return (MECHANISMS["blockwise"].attend(q, *kv, call, scene, extras) * out_grad).sum()

    value, (dk, dv) = loss((k, v), 0)
    assert value == loss((k, v), 0)[0]
    others = [loss((k, v), number)[0] for number in range(200)]
    assert np.std(others) > 0.1
    whole = MECHANISMS["vanilla"].attend(q, k, v, call, scene)
    error = 4 * np.std(others) / len(others) ** 0.5
    assert abs(np.mean(others) - (whole * out_grad).sum()) < error
    # The result is linear in v: its gradient gives it back only with the same weights.
    np.testing.assert_allclose((dv * v).sum(), value, rtol=1e-4)
    step = 1e-2 * np.random.default_rng(1).standard_normal(k.shape).astype(np.float32)
    slope = (loss((k + step, v), 0)[0] - loss((k - step, v), 0)[0]) / 2
    np.testing.assert_allclose((dk * step).sum(), slope, rtol=2e-2)


def test_factors_of_dropout_make_up_for_what_they_drop():
    factors = np.asarray(dropout_factors(jax.random.key(0), 0.25, (10000,)))
    assert set(np.unique(factors)) == {0, np.float32(1 / 0.75)}
    assert factors.mean() == pytest.approx(1, abs=0.02)


def test_vanilla_shows_its_weights():
    it = CASES["sinks, a row of nothing"]
    q, k, v, _ = map(jnp.asarray, it.arrays)
    shown = weights(q, k, it.call, it.scene, it.extras)
    assert shown.shape == (2, 4, 11, 11)
    mixed = jnp.einsum("BNTS,BSNH->BTNH", shown, jnp.repeat(v, 2, axis=2))
    out = MECHANISMS["vanilla"].attend(q, k, v, it.call, it.scene, it.extras)
    np.testing.assert_allclose(mixed, out, atol=1e-6)
    assert (np.asarray(shown[1]).sum(-1)[:, 3:] < 1).all()
    assert not shown[0].any()


def test_vmap_changes_nothing():
    it = CASES["causal"]
    arrays = [jnp.asarray(x) for x in it.arrays[:3]]
    attend = lambda q, k, v: MECHANISMS["blockwise"].attend(q, k, v, it.call, it.scene, NOTHING)
    pair = [jnp.stack([x, 2 * x]) for x in arrays]
    got = jax.jit(jax.vmap(attend))(*pair)
    np.testing.assert_allclose(got[1], jax.jit(attend)(*(2 * x for x in arrays)), atol=1e-6)

"""Every mechanism against float64 NumPy, one query at a time."""

from __future__ import annotations

import dataclasses

import attention_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CASES

from flaxen.attention import (
    MECHANISMS,
    NOTHING,
    AttentionSettings,
    Blocks,
    Call,
    Mask,
    Scene,
    tiles,
    visible,
)

WAYS = {
    "vanilla": {},
    "sdpa": {},
    "blockwise": {},
    "blockwise, looped": {"FEW": 0, "SMALL": 0},
}
"""Mechanisms, and what to set in `tiles` for them; looped, small calls are treated as large ones."""

BLOCKS = Blocks(q=4, k=3)


@pytest.fixture
def attend(request, monkeypatch):
    """The mechanism that a test is parametrized with."""
    for name, value in WAYS[request.param].items():
        monkeypatch.setattr(tiles, name, value)
    return MECHANISMS[request.param.split(",")[0]].attend


def able(call):
    return [way for way in WAYS if MECHANISMS[way.split(",")[0]].refuse(call) is None]


def every_way(call=CASES["causal"].call):
    return pytest.mark.parametrize("attend", able(call), indirect=True)


def with_blocks(call):
    return dataclasses.replace(call, settings=AttentionSettings(blocks=BLOCKS))


@jax.jit(static_argnums=(0, 1))
def run(attend, call, arrays, scene, extras, out_grad):
    """The result and its gradients in q, k, v, bias, slopes and sinks."""
    out, pull = jax.vjp(lambda arrays, extras: attend(*arrays, call, scene, extras), arrays, extras)
    (dq, dk, dv), dextras = pull(out_grad)
    found = {"out": out, "q": dq, "k": dk, "v": dv}
    for field in dataclasses.fields(extras):
        if (grad := getattr(dextras, field.name)) is not None:
            found[field.name] = grad
    return found


def poisoned(case):
    """Keys that nobody sees hold what an unused slot may hold."""
    q, k, v, out_grad = case.arrays
    unseen = ~reference.sees(case.call, case.scene, len(q)).any(1)
    k, v = k.copy(), v.copy()
    k[unseen], v[unseen] = np.nan, np.inf
    return (q, k, v), out_grad


@pytest.mark.parametrize(
    ("attend", "name"),
    [(way, name) for name, case in CASES.items() for way in able(case.call)],
    indirect=["attend"],
)
def test_result_and_gradients_equal_float64_whatever_unseen_keys_hold(attend, name):
    case = CASES[name]
    arrays, out_grad = poisoned(case)
    got = run(attend, with_blocks(case.call), arrays, case.scene, case.extras, out_grad)
    want = reference.gradients(*arrays, case.call, case.scene, out_grad, case.extras)
    want["out"] = reference.attention(*arrays, case.call, case.scene, case.extras)
    assert got.keys() == want.keys()
    for part, truth in want.items():
        np.testing.assert_allclose(got[part], truth, atol=1e-5, err_msg=part)


def test_window_of_four_shows_four_keys():
    slots = jnp.arange(6)
    see = visible(Mask(window=4), Scene(q_slots=slots, k_slots=slots))
    np.testing.assert_array_equal(see[0].sum(-1), [1, 2, 3, 4, 4, 4])
    np.testing.assert_array_equal(np.flatnonzero(see[0, 5]), [2, 3, 4, 5])


@every_way()
def test_key_heads_are_repeated_not_tiled(attend):
    case = CASES["causal"]
    q, k, v, _ = case.arrays
    v = np.broadcast_to(np.float32([1, 2])[:, None], v.shape)
    got = attend(q, k, v, with_blocks(case.call), case.scene)
    np.testing.assert_allclose(got[0, :, :, 0], np.tile([1, 1, 2, 2], (len(q[0]), 1)), rtol=1e-6)


@every_way()
def test_large_scores_and_a_row_that_sees_nothing_keep_gradients_finite(attend):
    case = CASES["sinks, a row of nothing"]
    q, k, v, out_grad = case.arrays
    got = run(attend, with_blocks(case.call), (q * 1000, k, v), case.scene, NOTHING, out_grad)
    np.testing.assert_array_equal(got["out"][0], 0)
    assert all(np.isfinite(x).all() for x in got.values())


@pytest.mark.parametrize(
    ("attend", "dtype"),
    [
        (way, dtype)
        for dtype in ("float16", "bfloat16")
        for way in able(dataclasses.replace(CASES["causal"].call, dtype=dtype))
    ],
    indirect=["attend"],
)
def test_16_bit_floats_with_padding_stay_finite_and_close(attend, dtype):
    case = CASES["window, padded right and inside"]
    *arrays, out_grad = (jnp.asarray(x, dtype) for x in case.arrays)
    call = with_blocks(dataclasses.replace(case.call, dtype=dtype))
    got = run(attend, call, tuple(arrays), case.scene, NOTHING, out_grad)
    want = reference.gradients(*arrays, case.call, case.scene, out_grad)
    want["out"] = reference.attention(*arrays, case.call, case.scene)
    for part, truth in want.items():
        assert got[part].dtype == dtype
        np.testing.assert_allclose(np.float64(got[part]), truth, atol=3e-2, err_msg=part)


def test_softcap_is_applied_before_the_mask():
    q = np.zeros((1, 1, 1, 2), np.float32)
    q[..., 0] = 1
    k = np.array([10.0, 0.0, 50.0], np.float32)[None, :, None, None] * np.array([1.0, 0.0])
    v = np.eye(3, dtype=np.float32)[None, :, None]
    c = Call(Mask(), 1.0, 1, 3, 1, 1, 2, 3, "float32", "cpu", softcap=5.0)
    where = Scene(q_slots=jnp.array([2]), k_slots=jnp.arange(3), keep=jnp.array([[1, 1, 0]], bool))
    got = MECHANISMS["vanilla"].attend(q, k.astype(np.float32), v, c, where)[0, 0, 0]
    np.testing.assert_allclose(got, [0.991999, 0.008001, 0], atol=1e-6)

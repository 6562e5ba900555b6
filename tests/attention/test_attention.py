"""Every mechanism against float64 NumPy, one query at a time."""

from __future__ import annotations

import dataclasses

import attention_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.attention import (
    MECHANISMS,
    AttentionSettings,
    Call,
    Mask,
    Scene,
    choose,
    explain,
    visible,
)
from flaxen.core.errors import ConfigError


def call(T=6, S=None, N=4, K=2, H=8, mask=None, softcap=None, aligned=True, dtype="float32"):
    return Call(
        mask=mask or Mask(),
        scale=H**-0.5,
        queries=T,
        keys=S or T,
        heads=N,
        kv_heads=K,
        head_dim=H,
        v_head_dim=H,
        dtype=dtype,
        platform="cpu",
        aligned=aligned,
        softcap=softcap,
    )


def asking(mechanism, **changes):
    return dataclasses.replace(call(**changes), settings=AttentionSettings(mechanism))


def scene(T, keep=None, segments=None, aligned=True):
    slots = jnp.arange(T, dtype=jnp.int32)
    return Scene(
        q_slots=slots,
        k_slots=slots,
        keep=keep,
        q_segments=segments,
        k_segments=segments,
        aligned=aligned,
    )


def arrays(seed, B, T, N, K, H, dtype=np.float32):
    rng = np.random.default_rng(seed)
    make = lambda heads: rng.standard_normal((B, T, heads, H)).astype(dtype)
    return make(N), make(K), make(K)


def able(c):
    return [name for name, m in MECHANISMS.items() if m.refuse(c) is None]


CASES = {
    "causal": (call(), None, None),
    "one token": (call(T=1), None, None),
    "long odd length": (call(T=131), None, None),
    "window of four": (call(T=9, mask=Mask(window=4)), None, None),
    "window over blocks": (call(T=140, mask=Mask(window=37)), None, None),
    "softcap": (call(softcap=2.0), None, None),
    "one key head": (call(K=1), None, None),
    "as many key heads": (call(K=4), None, None),
    "left padding": (call(T=7), [[0, 0, 0, 1, 1, 1, 1], [1] * 7], None),
    "right padding": (call(T=7), [[1, 1, 1, 0, 0, 0, 0], [1] * 7], None),
    "packed documents": (call(T=7), None, [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]]),
    "bidirectional": (call(mask=Mask(causal=False)), None, None),
}


@pytest.mark.parametrize(
    ("name", "case"), [(m, c) for c in CASES for m in able(CASES[c][0])], ids=lambda x: str(x)
)
def test_equals_float64(name, case):
    c, keep, segments = CASES[case]
    keep = None if keep is None else jnp.array(keep, bool)
    where = scene(c.queries, keep, None if segments is None else jnp.array(segments))
    q, k, v = arrays(1, 2, c.queries, c.heads, c.kv_heads, c.head_dim)
    got = jax.jit(lambda q, k, v: MECHANISMS[name].attend(q, k, v, c, where))(q, k, v)
    np.testing.assert_allclose(got, reference.attention(q, k, v, c, where), atol=2e-6)


@pytest.mark.parametrize("name", able(call()))
def test_gradients_equal_vanilla_in_float32(name):
    c, where = call(T=131), scene(131, jnp.arange(131)[None] > 2)  # more than one block
    q, k, v = arrays(2, 2, 131, 4, 2, 8)
    w = np.random.default_rng(3).standard_normal(q.shape).astype(np.float32)

    def gradient(name):
        return jax.jit(jax.grad(lambda args: (MECHANISMS[name].attend(*args, c, where) * w).sum()))

    got, want = gradient(name)((q, k, v)), gradient("vanilla")((q, k, v))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_window_of_four_shows_four_keys():
    see = visible(Mask(window=4), scene(6))
    np.testing.assert_array_equal(see[0].sum(-1), [1, 2, 3, 4, 4, 4])
    np.testing.assert_array_equal(np.flatnonzero(see[0, 5]), [2, 3, 4, 5])


@pytest.mark.parametrize("name", able(call()))
def test_key_heads_are_repeated_not_tiled(name):
    q, k, _ = arrays(4, 1, 3, 4, 2, 8)
    v = np.broadcast_to(np.array([1.0, 2.0])[None, None, :, None], k.shape).astype(np.float32)
    got = MECHANISMS[name].attend(q, k, v, call(T=3), scene(3))
    np.testing.assert_allclose(got[0, :, :, 0], np.tile([1, 1, 2, 2], (3, 1)), rtol=1e-6)


@pytest.mark.parametrize("name", able(call()))
def test_a_row_that_sees_nothing_is_zero_with_finite_gradients(name):
    q, k, v = arrays(5, 2, 5, 4, 2, 8)
    where = scene(5, jnp.array([[0] * 5, [1] * 5], bool))
    out, pull = jax.vjp(
        jax.jit(lambda *args: MECHANISMS[name].attend(*args, call(T=5), where)), q * 100, k, v
    )
    np.testing.assert_array_equal(out[0], 0)
    assert all(np.isfinite(g).all() for g in pull(jnp.ones_like(out)))


@pytest.mark.parametrize("garbage", [1e4, np.nan, np.inf])
@pytest.mark.parametrize("name", able(call()))
def test_keys_that_nobody_sees_do_not_leak(name, garbage):
    q, k, v = arrays(6, 1, 6, 4, 2, 8)
    where = scene(6, jnp.array([[0, 0, 1, 1, 1, 1]], bool))
    attend = jax.jit(lambda *args: MECHANISMS[name].attend(*args, call(), where))
    clean = np.asarray(attend(q, k, v))
    k[:, :2], v[:, :2] = garbage, garbage
    np.testing.assert_array_equal(clean, attend(q, k, v))


@pytest.mark.parametrize("name", able(call()))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_floats_with_padding_stay_finite_and_close(name, dtype):
    q, k, v = arrays(7, 1, 5, 4, 2, 8)
    where = scene(5, jnp.array([[0, 0, 1, 1, 1]], bool))
    low = [jnp.asarray(x, dtype) for x in (q, k, v)]
    got = np.asarray(
        MECHANISMS[name].attend(*low, call(T=5, dtype=dtype), where).astype(jnp.float32)
    )
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, reference.attention(q, k, v, call(T=5), where), atol=2e-2)


def test_softcap_is_applied_before_the_mask():
    q = np.zeros((1, 1, 1, 2), np.float32)
    q[..., 0] = 1
    k = np.array([10.0, 0.0, 50.0], np.float32)[None, :, None, None] * np.array([1.0, 0.0])
    v = np.eye(3, dtype=np.float32)[None, :, None]
    c = Call(Mask(), 1.0, 1, 3, 1, 1, 2, 3, "float32", "cpu", softcap=5.0)
    where = Scene(q_slots=jnp.array([2]), k_slots=jnp.arange(3), keep=jnp.array([[1, 1, 0]], bool))
    got = MECHANISMS["vanilla"].attend(q, k.astype(np.float32), v, c, where)[0, 0, 0]
    np.testing.assert_allclose(got, [0.991999, 0.008001, 0], atol=1e-6)


def test_a_refusal_names_the_reason():
    with pytest.raises(ConfigError, match="softcap"):
        choose(asking("sdpa", softcap=3.0))
    assert "softcap" in dict(explain(call(softcap=3.0)))["sdpa"]


def test_an_unknown_mechanism_offers_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'vanilla'"):
        choose(asking("vanila"))

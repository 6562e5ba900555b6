"""Blockwise attention against float64 NumPy, gradients included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxen.attention.blockwise import decode_one, triangular


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def exact(q, k, v, seen, scale, softcap=None, grad=None):
    """Attention in float64 with repeated key heads, and its gradients. seen: (B, T, S)."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    group = q.shape[2] // k.shape[2]
    kr, vr = np.repeat(k, group, 2), np.repeat(v, group, 2)
    raw = np.einsum("btnh,bsnh->bnts", q, kr) * scale
    s = softcap * np.tanh(raw / softcap) if softcap else raw
    seen = seen[:, None]
    e = np.where(seen, np.exp(s - s.max(-1, keepdims=True)), 0)
    p = e / np.where(e.sum(-1, keepdims=True) > 0, e.sum(-1, keepdims=True), 1)
    out = np.einsum("bnts,bsnh->btnh", p, vr)
    if grad is None:
        return out
    dp = np.einsum("btnh,bsnh->bnts", grad, vr)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    ds = ds * (1 - np.tanh(raw / softcap) ** 2) if softcap else ds
    fold = lambda a: a.reshape(*a.shape[:2], -1, group, a.shape[3]).sum(3)
    dq = np.einsum("bnts,bsnh->btnh", ds, kr)
    dk = fold(np.einsum("bnts,btnh->bsnh", ds, q))
    return out, dq, dk, fold(np.einsum("bnts,btnh->bsnh", p, grad))


def causal(batch, length, window=None, keep=None):
    behind = np.arange(length)[:, None] - np.arange(length)
    seen = (behind >= 0) & (behind < (window or length))
    return np.broadcast_to(seen, (batch, length, length)) & (True if keep is None else keep)


def padded(length):
    """The first sequence whole, the second with two padding keys on the left."""
    keep = np.ones((2, 1, length), bool)
    keep[1, :, :2] = False
    return keep


def segments(length):
    owner = np.stack([np.arange(length) // 3, np.arange(length) // 5])
    return owner[:, :, None] == owner[:, None, :]


def run(q, k, v, grad, **how):
    @jax.jit
    def both(grad, *args):
        out, pull = jax.vjp(lambda *a: triangular(*a, **how), *args)
        return out, *pull(grad)

    return both(*(jnp.asarray(a, jnp.float32) for a in (grad, q, k, v)))


CASES = [
    (1, (4, 2), None, None),
    (4, (3, 3), None, padded),
    (13, (4, 2), None, None),
    (13, (4, 2), 5, padded),
    (13, (4, 1), 1, segments),
    (13, (3, 3), None, segments),
]


@pytest.mark.parametrize(("length", "heads", "window", "mask"), CASES)
def test_output_and_gradients_agree_with_float64(length, heads, window, mask):
    n, kv = heads
    q, k = draw(2, length, n, 6), draw(2, length, kv, 6, seed=1)
    v, grad = draw(2, length, kv, 5, seed=2), draw(2, length, n, 5, seed=3)
    keep = mask(length) if mask else None
    got = run(
        q, k, v, grad, scale=0.4, window=window, block=4,
        keep=None if keep is None else jnp.asarray(keep),
    )  # fmt: skip
    want = exact(q, k, v, causal(2, length, window, keep), 0.4, grad=grad)
    for mine, truth in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, truth, atol=5e-6)


def test_softcap_bends_scores_and_their_gradients():
    q, k, v, grad = draw(1, 9, 4, 6), draw(1, 9, 2, 6, seed=1), draw(1, 9, 2, 6), draw(1, 9, 4, 6)
    got = run(q, k, v, grad, scale=1.0, softcap=2.0, block=4)
    for mine, truth in zip(got, exact(q, k, v, causal(1, 9), 1.0, 2.0, grad), strict=True):
        np.testing.assert_allclose(mine, truth, atol=5e-6)


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 3e-2), ("float16", 4e-3)])
def test_short_floats_keep_their_dtype(dtype, bound):
    q, k, v = (jnp.asarray(draw(1, 20, n, 8, seed=n), dtype) for n in (4, 2, 2))
    out = triangular(q, k, v, scale=0.3, block=16)
    assert out.dtype == q.dtype
    np.testing.assert_allclose(
        np.asarray(out, np.float64), exact(q, k, v, causal(1, 20), 0.3), atol=bound
    )


def test_float64_stays_exact():
    with jax.enable_x64(True):
        q, k, v = draw(1, 9, 4, 6), draw(1, 9, 2, 6, seed=1), draw(1, 9, 2, 6, seed=2)
        out = triangular(*(jnp.asarray(a) for a in (q, k, v)), scale=0.4, block=4)
        np.testing.assert_allclose(out, exact(q, k, v, causal(1, 9), 0.4), atol=1e-13)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_query_without_keys_gives_zeros_and_hidden_keys_never_leak(poison):
    q, k, v, grad = draw(2, 6, 4, 6), draw(2, 6, 2, 6), draw(2, 6, 2, 6), draw(2, 6, 4, 6, seed=3)
    keep = padded(6)
    want = exact(q, k, v, causal(2, 6, keep=keep), 0.4, grad=grad)
    k[1, :2], v[1, :2] = poison, poison
    got = run(q, k, v, grad, scale=0.4, block=4, keep=jnp.asarray(keep))
    assert not got[0][1, :2].any()
    for mine, truth in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, truth, atol=5e-6)


def test_jit_and_vmap_change_nothing():
    q, k, v = (jnp.float32(draw(3, 2, 6, n, 4, seed=n)) for n in (4, 2, 2))
    call = lambda q, k, v: triangular(q, k, v, scale=0.4, block=4)
    np.testing.assert_allclose(
        jax.jit(jax.vmap(call))(q, k, v)[1], call(q[1], k[1], v[1]), atol=1e-6
    )


@pytest.mark.parametrize("spec", [P("a", None, "b"), P(None, None, "a"), P(None, "b")])
def test_sharded_heads_batch_and_sequence_give_the_same(spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    q, k, v, grad = (draw(4, 8, n, 4, seed=s) for n, s in ((8, 0), (4, 1), (4, 2), (8, 3)))
    place = lambda a: jax.device_put(jnp.float32(a), NamedSharding(mesh, spec))
    step = jax.jit(lambda *a: run(*a, scale=0.4, block=4))
    got = step(place(q), place(k), place(v), place(grad))
    for mine, truth in zip(got, exact(q, k, v, causal(4, 8), 0.4, grad=grad), strict=True):
        np.testing.assert_allclose(mine, truth, atol=5e-6)


@pytest.mark.parametrize(
    ("queries", "heads", "softcap"), [(1, (4, 2), None), (3, (4, 1), 2.0), (3, (2, 2), None)]
)
def test_a_few_queries_on_a_cache_agree_with_float64(queries, heads, softcap):
    n, kv = heads
    q, k, v = draw(2, queries, n, 6), draw(2, 7, kv, 6, seed=1), draw(2, 7, kv, 5, seed=2)
    keep = np.arange(7) <= np.arange(queries)[:, None] + np.array([1, 3])[:, None, None]
    want = exact(q, k, v, keep, 0.4, softcap)
    hidden = ~keep.any(1)
    k[hidden], v[hidden] = np.nan, np.inf
    out = decode_one(
        jnp.float32(q),
        jnp.float32(k.swapaxes(1, 2)),
        jnp.float32(v.swapaxes(1, 2)),
        scale=0.4,
        keep=jnp.asarray(keep),
        softcap=softcap,
    )
    np.testing.assert_allclose(out, want, atol=5e-6)


def test_a_query_that_sees_no_slot_gives_zeros():
    keep = jnp.array([[[False] * 5]])
    cache = jnp.full((1, 2, 5, 4), jnp.nan)
    out = decode_one(jnp.ones((1, 1, 4, 4)), cache, cache, scale=1.0, keep=keep)
    np.testing.assert_array_equal(out, np.zeros((1, 1, 4, 4)))

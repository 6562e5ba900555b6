"""Products against float64 NumPy, whatever rule the platform chooses."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flaxen.core import dot as products
from flaxen.core.dot import arithmetic, dense, dot, rows
from flaxen.core.platform import compiling_for

BOUNDS = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3, "float64": 1e-14}


def draw(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def exact(x, weight, contract):
    return np.tensordot(
        np.asarray(x, np.float64),
        np.asarray(weight, np.float64),
        (range(x.ndim - contract, x.ndim), range(weight.ndim - contract, weight.ndim)),
    )


def close(got, want, dtype):
    want = np.asarray(want)
    scale = max(float(np.max(np.abs(want), initial=0)), 1e-30)
    assert got.shape == want.shape
    assert np.max(np.abs(np.asarray(got, np.float64) - want), initial=0) <= BOUNDS[dtype] * scale


@functools.partial(jax.jit, static_argnums=(3, 4))
def with_gradients(x, weight, grad, contract, native):
    y, pull = jax.vjp(lambda x, w: dot(x, w, contract), x, weight)
    return y, pull(grad)


SHAPES = [
    ((7,), (5, 7), 1),
    ((1, 7), (5, 7), 1),
    ((1, 1, 7), (3, 5, 7), 1),
    ((3, 5, 7), (2, 7), 1),
    ((2, 9, 3, 5), (7, 3, 5), 2),
    ((1, 1, 3, 5), (7, 3, 5), 2),
    ((33, 65), (31, 65), 1),
    ((0, 7), (5, 7), 1),
]


@pytest.mark.parametrize(
    ("dtype", "native"),
    [("float32", False), ("bfloat16", False), ("bfloat16", True), ("float16", False)],
)
@pytest.mark.parametrize(("xs", "ws", "contract"), SHAPES)
def test_products_and_gradients_agree_with_float64(xs, ws, contract, dtype, native, monkeypatch):
    jax.clear_caches()
    monkeypatch.setattr(products, "_cpu_multiplies_bfloat16", lambda: native)
    x, weight = draw(*xs, dtype=dtype), draw(*ws, seed=1, dtype=dtype)
    grad = draw(*xs[: len(xs) - contract], *ws[: len(ws) - contract], seed=2, dtype=dtype)
    y, (dx, dw) = with_gradients(x, weight, grad, contract, native)
    assert y.dtype == x.dtype
    close(y, exact(x, weight, contract), dtype)
    out = len(ws) - contract
    g, w, a = (np.asarray(t, np.float64) for t in (grad, weight, x))
    batch = len(xs) - contract
    close(dx, np.tensordot(g, w, out), dtype)
    close(dw, np.tensordot(g, a, (range(batch), range(batch))), dtype)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x, weight = draw(3, 7, dtype="float64"), draw(5, 7, seed=1, dtype="float64")
        y = dot(x, weight)
        assert y.dtype == jnp.float64
        close(y, exact(x, weight, 1), "float64")


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("length", [1, 33])
def test_vmap_and_jit_change_nothing(length, native, monkeypatch):
    monkeypatch.setattr(products, "_cpu_multiplies_bfloat16", lambda: native)
    x, weight = draw(4, length, 7, dtype="bfloat16"), draw(4, 5, 7, seed=1, dtype="bfloat16")
    got = jax.jit(jax.vmap(dot))(x, weight)
    want = np.stack([exact(a, b, 1) for a, b in zip(x, weight, strict=True)])
    close(got, want, "bfloat16")


def test_sixteen_bit_sums_are_wide():
    x = jnp.ones((1, 4096), jnp.bfloat16)
    for count in (1, 2, 20):
        y = dense(jnp.tile(x, (count, 1)), x, 1, jnp.float32)
        assert y.dtype == jnp.float32
        np.testing.assert_array_equal(y, 4096)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("spec", [P("a", "b"), P("b", None), P(None, "a")])
@pytest.mark.parametrize("batch", [1, 32])
def test_sharded_operands_give_the_same(batch, spec, native, monkeypatch):
    monkeypatch.setattr(products, "_cpu_multiplies_bfloat16", lambda: native)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x, weight = draw(batch, 16, dtype="bfloat16"), draw(8, 16, seed=1, dtype="bfloat16")
    placed = jax.device_put(weight, NamedSharding(mesh, spec))
    rows_by = P("b" if batch > 1 else None, None)
    xs = jax.device_put(x, NamedSharding(mesh, rows_by))
    ones = jnp.ones((batch, 8), jnp.bfloat16)
    y, (_, dw) = jax.jit(with_gradients.__wrapped__, static_argnums=(3, 4))(
        xs, placed, ones, 1, native
    )
    close(y, exact(x, weight, 1), "bfloat16")
    close(dw, np.broadcast_to(np.asarray(x, np.float64).sum(0), weight.shape), "bfloat16")


def test_other_hardware_gets_one_plain_product(monkeypatch):
    monkeypatch.setattr(products, "_cpu_multiplies_bfloat16", lambda: False)
    x, weight = draw(1, 7, dtype="bfloat16"), draw(5, 7, dtype="bfloat16")
    with compiling_for("tpu"):
        ops = [e.primitive.name for e in jax.make_jaxpr(dot)(x, weight).eqns]
        assert arithmetic("bfloat16") == jnp.bfloat16
    assert [o for o in ops if o != "convert_element_type"] == ["dot_general"]
    assert arithmetic("bfloat16") == jnp.float32


def test_rows_of_a_table():
    table = draw(5, 3)
    ids = jnp.array([[4, 0], [2, 2]])
    np.testing.assert_array_equal(rows(table, ids), np.asarray(table)[np.asarray(ids)])

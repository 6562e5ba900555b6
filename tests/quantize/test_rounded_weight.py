"""Products with rounded weights, against float64 NumPy on their values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.convert.arrays import ArrayTensor
from flaxen.core.dot import WeightLeaf, dot, rows
from flaxen.core.platform import compiling_for
from flaxen.layers.grouped import grouped_dot
from flaxen.quantize import RoundedWeight, Rounding
from flaxen.quantize.rounded import rounded_weight
from flaxen.quantize.rounded_tensors import rounded_parts

KINDS = [Rounding(8), Rounding(8, 32), Rounding(4), Rounding(4, -1)]


def leaf_of(rounding, shape=(2, 24, 64), outs=2, lead=0, seed=0):
    """A leaf, and its values in float64."""
    w = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    inner, split = shape[lead:], lead + outs
    flat = w.reshape(*shape[:lead], int(np.prod(shape[lead:split])), -1)
    fitted = rounding.fitted(*flat.shape[-2:])
    lazy = rounded_parts(ArrayTensor(flat), fitted)
    parts = {role: jnp.asarray(part.read()) for role, part in lazy.items()}
    leaf = rounded_weight(parts, fitted, inner, outs, np.dtype(np.float32), whole=False)
    plain = fitted.values({role: np.asarray(part) for role, part in parts.items()})
    return leaf, plain.astype(np.float64).reshape(shape)


def cut(leaf, pieces):
    return RoundedWeight(**{**vars(leaf), "pieces": pieces})


@pytest.mark.parametrize("rounding", KINDS, ids=str)
@pytest.mark.parametrize("pieces", [1, 6])
@pytest.mark.parametrize("batch", [(1,), (3, 7)])
def test_a_product_is_that_of_the_values(rounding, pieces, batch):
    leaf, values = leaf_of(rounding)
    x = np.random.default_rng(1).standard_normal((*batch, 64)).astype(np.float32)
    found = jax.jit(dot)(x, cut(leaf, pieces))
    assert isinstance(leaf, WeightLeaf)
    assert found.shape == (*batch, 2, 24)
    np.testing.assert_allclose(found, np.einsum("...i,abi->...ab", x, values), atol=1e-5)


def test_several_axes_are_contracted():
    leaf, values = leaf_of(Rounding(4), (24, 2, 32), outs=1)
    x = np.random.default_rng(1).standard_normal((5, 2, 32)).astype(np.float32)
    np.testing.assert_allclose(dot(x, leaf, 2), np.einsum("bij,aij->ba", x, values), atol=1e-5)


@pytest.mark.parametrize("rounding", [Rounding(8), Rounding(4)], ids=str)
def test_elsewhere_than_on_cpu_products_are_in_the_dtype_of_x(rounding):
    leaf, values = leaf_of(rounding)
    x = np.random.default_rng(1).standard_normal((4, 64)).astype(jnp.bfloat16)
    with compiling_for("tpu"):
        found = cut(leaf, 6).dot(jnp.asarray(x), 1)
    assert found.dtype == jnp.bfloat16
    expected = np.einsum("bi,nai->bna", x.astype(float), values)
    np.testing.assert_allclose(found.astype(float), expected, atol=0.15)


@pytest.mark.parametrize("rounding", KINDS, ids=str)
def test_rows_of_a_table(rounding):
    leaf, values = leaf_of(rounding, (10, 64), outs=1)
    ids = jnp.array([[3, 0, 9], [4, 4, 1]])
    np.testing.assert_array_equal(rows(leaf, ids), values[np.asarray(ids)].astype(np.float32))


@pytest.mark.parametrize("rounding", KINDS, ids=str)
def test_a_gradient_goes_to_x_and_keeps_no_values(rounding):
    leaf, values = leaf_of(rounding)
    rng = np.random.default_rng(1)
    x, grad = (rng.standard_normal(s).astype(np.float32) for s in ((3, 64), (3, 2, 24)))
    _, pull = jax.vjp(lambda x: dot(x, cut(leaf, 6)), x)
    np.testing.assert_allclose(pull(grad)[0], np.einsum("bna,nai->bi", grad, values), atol=1e-5)
    kept = sum(x.nbytes for x in jax.tree.leaves(pull))
    assert kept < values.size * 4
    frozen = jax.grad(lambda leaf: dot(x, leaf).sum(), allow_int=True)(leaf)
    assert not np.asarray(frozen.parts["scales"]).any()


@pytest.mark.parametrize("rounding", [Rounding(8), Rounding(4, 32)], ids=str)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_experts_are_worked_out_for_their_rows(rounding, platform):
    leaf, values = leaf_of(rounding, (3, 24, 64), outs=1, lead=1)
    sizes = np.array([4, 0, 5])
    rng = np.random.default_rng(1)
    x, grad = (rng.standard_normal(s).astype(np.float32) for s in ((9, 64), (9, 24)))
    with compiling_for(platform):
        y, pull = jax.vjp(lambda x: grouped_dot(x, leaf, jnp.asarray(sizes)), x)
        (dx,) = pull(grad)
    mine = values[np.repeat(np.arange(3), sizes)]
    np.testing.assert_allclose(y, np.einsum("ri,roi->ro", x, mine), atol=1e-5)
    np.testing.assert_allclose(dx, np.einsum("ro,roi->ri", grad, mine), atol=1e-5)


def test_pieces_stay_in_the_cache_and_are_not_too_many():
    make = lambda *shape: rounded_weight(
        {}, Rounding(8), shape, 1, np.dtype(np.float32), whole=False
    )
    assert make(4096, 2048).pieces == 32
    assert make(64, 64).pieces == 1
    assert make(50257, 768).pieces == 29  # its other divisor is 1733

"""Pieces give what the whole gives, and what does not fit is refused in Transformers' words."""

from __future__ import annotations

import ast
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import DATA

from flaxen.core.errors import InputError
from flaxen.layers.chunking import apply_chunking_to_forward

GOLDEN = json.loads((DATA / "unit" / "chunking_errors.json").read_text())


def one(x):
    return 2 * x


def two(x, y):
    return x + y


@pytest.mark.parametrize(("call", "want"), GOLDEN)
def test_what_transformers_says(call, want):
    _, size, dim, *shapes = ast.literal_eval(call)
    function = two if "same shape" in want else one
    run = lambda: apply_chunking_to_forward(function, size, dim, *map(jnp.ones, shapes))
    kind, text = want.split(" ", 1)
    if kind == "ok":
        assert run().shape == ast.literal_eval(text)
        return
    with pytest.raises(InputError) as error:
        run()
    assert str(error.value) == text


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_along_any_axis(dim):
    x, y = numbers(4, 6, 8), numbers(4, 6, 8) ** 2
    got = jax.jit(lambda x, y: apply_chunking_to_forward(two, 2, dim, x, y))(x, y)
    np.testing.assert_array_equal(got, x + y)


def test_an_output_of_another_width_and_a_tree_of_them():
    x, w = numbers(2, 6, 3), numbers(3, 5)
    wide, norm = apply_chunking_to_forward(lambda x: (x @ w, (x**2).sum(-1)), 2, 1, x)
    np.testing.assert_allclose(wide, x @ w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm, (x**2).sum(-1), rtol=1e-6)


def test_gradients():
    x, w = numbers(2, 6, 3), numbers(3, 5)
    loss = lambda f: jax.grad(lambda w: (f(w) ** 2).sum())(w)
    got = loss(lambda w: apply_chunking_to_forward(lambda x: jnp.tanh(x @ w), 3, -2, x))
    want = loss(lambda w: jnp.tanh(x @ w))
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_the_program_does_not_grow_with_the_number_of_pieces():
    size = lambda chunk: len(
        str(jax.make_jaxpr(lambda x: apply_chunking_to_forward(one, chunk, 0, x))(numbers(64, 2)))
    )
    assert size(1) <= size(32) + 10


def test_each_piece_is_of_the_size_that_was_asked():
    seen = []
    apply_chunking_to_forward(lambda x: [seen.append(x.shape), x][1], 3, 1, numbers(2, 12))
    assert seen == [(2, 3)]

"""Distances between tokens that come in several calls are counted in tokens, not in slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from flaxen.models import causal

extend = jax.jit(causal.extend, static_argnums=4)
forward = jax.jit(causal.forward, static_argnames="runtime")


@pytest.mark.parametrize("name", ["bloom", "opt", "mistral"])
def test_padding_between_two_calls_is_no_distance(name):
    model, ids = tiny.model(name), tiny.tokens(2, 9)
    first = jnp.array([[True, True, False, False, False], [True] * 5])
    cache = model.module.init_cache(2, 16)
    _, cache = extend(model.module, ids[:, :5], cache, first, model.runtime)
    then = jnp.ones((2, 4), bool)
    x, _ = extend(model.module, ids[:, 5:], cache, then, model.runtime)
    alone = jnp.concatenate([ids[:1, :2], ids[:1, 5:]], 1)
    want = forward(model.module, alone, runtime=model.runtime).logits[0, 2:]
    got = model.module.logits(x, model.runtime)[0]
    np.testing.assert_allclose(got, want, atol=2e-5)

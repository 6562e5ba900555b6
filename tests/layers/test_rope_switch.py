"""A cache whose keys would be others by now is refused, wherever it is given."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from golden import case

from flaxen.core.errors import CacheError
from flaxen.model import Model, Origin


@pytest.fixture(scope="module")
def model():
    """Phi 3, which changes its frequencies past 16 tokens."""
    config = json.dumps(case("phi3").config)
    return Model(module=tiny.model("phi3").module, origin=Origin(config_json=config))


def holding(model, tokens, capacity=24):
    cache = model.init_cache(1, capacity)
    held = jnp.int32(tokens)
    keep = jnp.arange(capacity)[None] < tokens
    return dataclasses.replace(cache, index=held, lengths=held[None], keep=keep)


IDS = tiny.tokens(1, 21)


def test_a_call_that_would_pass_the_switch(model):
    with pytest.raises(CacheError, match="Past 16 tokens .* cache of 14 cannot grow to 17"):
        model(IDS[:, :3], past_key_values=holding(model, 14))


def shape_of(model, ids, mask, cache):
    """The checks run, the arithmetic does not."""
    return jax.eval_shape(lambda: model(ids, mask, past_key_values=cache).logits).shape


def test_padding_does_not_pass_it(model):
    cache, ids = holding(model, 14), IDS[:, :3]
    with pytest.raises(CacheError):
        shape_of(model, ids, np.array([[1, 1, 1]]), cache)
    assert shape_of(model, ids, np.array([[0, 1, 1]]), cache) == (1, 3, 128)


@pytest.mark.parametrize("held", [0, 17])
def test_a_text_that_is_past_it_at_once_goes_on(model, held):
    """All keys are of one kind then."""
    assert shape_of(model, IDS[:, :17], None, holding(model, held, 40)) == (1, 17, 128)

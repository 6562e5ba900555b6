"""A model with any cache says what it says without one: logits and tokens of Transformers."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from golden_meshes import alike

from flaxen.cache import CacheSettings, Dense, Ring
from flaxen.generate import generate
from flaxen.models.causal import extend
from flaxen.models.fold import fold

ROOM = 48


BOUNDS = {"int8": 0.06, "int4": 0.7, "fp8": 0.6}
"""Largest error of a logit, by the logits' own spread. A key's or value's channel is off by
absmax/254, absmax/14 or a sixteenth at most, and absmax is about three times a channel's spread
here; over two to four layers such errors nearly add up.
"""


@partial(jax.jit, static_argnames=("runtime",))
def in_pieces(decoder: Any, ids: Any, garbage: Any, *, runtime: Any) -> Any:
    """Logits of ids (1, T): seven tokens, then five more, then one by one; in a cache that was full
    of garbage.
    """
    cache = decoder.init_cache(1, ROOM, runtime=runtime)
    dirty = lambda x: jnp.full_like(x, garbage) if jnp.issubdtype(x.dtype, jnp.floating) else x + 77
    cache = dataclasses.replace(cache, layers=jax.tree.map(dirty, cache.layers))
    pieces = []
    for start, stop in ((0, 7), (7, 12)):
        new = ids[:, start:stop]
        valid = jnp.ones(new.shape, bool)
        x, cache = extend(decoder, new, cache, valid, runtime, fresh=start == 0)
        pieces.append(x)

    def step(cache: Any, token: Any) -> Any:
        x, cache = extend(decoder, token[:, None], cache, jnp.ones((1, 1), bool), runtime)
        return cache, x[:, 0]

    _, xs = jax.lax.scan(step, cache, ids[:, 12:].T)
    return decoder.logits(jnp.concatenate([*pieces, xs.swapaxes(0, 1)], 1), runtime)


def logits(name: str, garbage: float = np.nan, folded: bool = False, **settings: Any) -> Any:
    model = tiny.model(name)
    decoder = model.module
    if folded:
        decoder = dataclasses.replace(decoder, layers=fold(decoder.layers, jnp.stack))
    runtime = dataclasses.replace(model.runtime, cache=CacheSettings(page_size=4, **settings))
    ids = golden.case(name).arrays["long_input_ids"][:1, :ROOM]
    return np.asarray(in_pieces(decoder, ids, garbage, runtime=runtime))


def want(name: str) -> np.ndarray:
    return golden.case(name).arrays["long_logits"][:1, :ROOM]


@pytest.mark.parametrize(
    ("name", "layout"),
    [("gemma3_text", "ring"), ("gemma3_text", "paged"), ("llama", "dense"), ("jamba", "paged")]
    + [(name, "dense") for name in ("mamba2", "qwen3_next")]
    + [alike("mistral", "ring"), alike("falcon_mamba", "dense"), alike("lfm2", "dense")],
)
def test_logits_of_a_long_text(name, layout):
    """Unused slots hold NaN, and change nothing."""
    bound = golden.case(name).bound
    np.testing.assert_allclose(logits(name, layout=layout), want(name), atol=bound)


def test_folded_layers_with_rings_of_codes():
    got = logits("gemma3_text", folded=True, layout="ring", codec="int8")
    assert off(got, "gemma3_text") < BOUNDS["int8"]


def test_folded_recurrent_layers_and_codes():
    """Only the inputs of the convolutions are stored as codes: states stay exact."""
    assert off(logits("mamba2", folded=True, codec="int8"), "mamba2") < BOUNDS["int8"]


@pytest.mark.parametrize("codec", BOUNDS)
def test_quantised_logits_stay_near(codec):
    got = off(logits("mistral", layout="dense", codec=codec), "mistral")
    assert BOUNDS[codec] / 10 < got < BOUNDS[codec]


def off(got: np.ndarray, name: str) -> float:
    return float(np.abs(got - want(name)).max() / want(name).std())


@pytest.mark.parametrize(("name", "layout"), [("gemma3_text", "paged"), ("mistral", "dense")])
def test_greedy_tokens_of_padded_prompts(name, layout):
    """Rings, which `auto` takes, are in tests/generate."""
    model = tiny.model(name)
    settings = CacheSettings(layout=layout, page_size=8)
    model = dataclasses.replace(model, runtime=dataclasses.replace(model.runtime, cache=settings))
    x = golden.case(name).arrays
    got = generate(
        model,
        x["gen_input_ids"],
        x["gen_attention_mask"],
        max_new_tokens=16,
        eos_token_id=[],
    )
    np.testing.assert_array_equal(got, x["gen_sequences"])


def test_only_layers_with_a_window_are_rings():
    cache = jax.eval_shape(lambda: tiny.model("gemma3_text").module.init_cache(1, 64))
    assert [type(layer) for layer in cache.layers] == [Ring, Dense, Ring, Dense]
    assert cache.layers[0].k.shape == (1, 2, 8, 16)
    small = jax.eval_shape(lambda: tiny.model("gemma3_text").module.init_cache(1, 8))
    assert [type(layer) for layer in small.layers] == [Dense] * 4

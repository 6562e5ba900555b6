"""Latent attention: what a token leaves behind, and that queries meet it as it is."""

from __future__ import annotations

import dataclasses
import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from flaxen.cache import CacheSettings, Latent
from flaxen.core.errors import CacheError
from flaxen.layers.latent import LatentAttention
from flaxen.layers.runtime import Runtime
from flaxen.models.causal import forward, forward_cached
from flaxen.models.fold import folded
from flaxen.quantize import rounded

CASES = ["deepseek_v2", "deepseek_v3"]


@functools.partial(jax.jit, static_argnames=("runtime", "pieces"))
def in_pieces(decoder, ids, mask, runtime, pieces):
    """Logits of a text that comes in pieces, and the cache."""
    cache = decoder.init_cache(len(ids), 16, runtime=runtime)
    got = []
    for start, end in pieces:
        part, valid = ids[:, start:end], mask[:, start:end].astype(bool)
        out = forward_cached(decoder, part, cache, valid, runtime=runtime)
        cache = out.past_key_values
        got.append(out.logits)
    return jnp.concatenate(got, 1), cache


@pytest.mark.parametrize("name", CASES)
def test_a_token_leaves_one_vector_and_one_key(name):
    model, config = tiny.model(name), golden.case(name).config
    cache = model.module.init_cache(2, 16)
    sizes = config["kv_lora_rank"], config["qk_rope_head_dim"]
    assert [layer.token for layer in cache.layouts] == [sizes] * 2
    floats = sum(x.size for x in jax.tree.leaves(cache.layers))
    assert floats == 2 * 2 * 16 * sum(sizes)
    attn = model.module.layers[0].self_attn
    assert attn.remembers == sum(sizes)


@pytest.mark.parametrize("name", CASES)
def test_pieces_of_a_padded_text_give_its_logits(name):
    model, x = tiny.model(name), golden.case(name).arrays
    pieces = ((0, 5), (5, 6), (6, 7), (7, 12))
    mask = x["attention_mask"]
    got, _ = in_pieces(model.module, x["input_ids"], mask, Runtime(), pieces)
    np.testing.assert_allclose(got[mask == 1], x["logits_pos"][mask == 1], atol=5e-5)


def test_matrices_that_are_no_arrays_expand_what_is_stored():
    """Rounded matrices can be multiplied from one side only; the numbers stay those of a whole
    text.
    """
    model, ids = tiny.model("deepseek_v3"), tiny.tokens(2, 7)
    module = rounded(model.module, 8)
    attn = module.layers[0].self_attn
    assert isinstance(attn, LatentAttention)
    assert not isinstance(attn.k_b_proj.weight, jax.Array)
    want = forward(module, ids, runtime=Runtime()).logits
    got, _ = in_pieces(module, ids, np.ones_like(ids), Runtime(), ((0, 4), (4, 5), (5, 7)))
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_stored_in_fewer_bits_it_is_what_every_query_sees():
    runtime = Runtime(cache=CacheSettings(codec="int8"))
    model, ids = tiny.model("deepseek_v2"), tiny.tokens(2, 9)
    ones = np.ones_like(ids)
    whole, cache = in_pieces(model.module, ids, ones, runtime, ((0, 9),))
    parts, _ = in_pieces(model.module, ids, ones, runtime, ((0, 4), (4, 5), (5, 9)))
    assert isinstance(cache.layouts[0], Latent)
    np.testing.assert_allclose(parts, whole, atol=1e-4)


@pytest.mark.exhaustive
def test_stacked_layers_go_on_as_plain_ones_do():
    """Two layers alike, stacked behind another."""
    decoder = tiny.model("deepseek_v2").module
    first, last = decoder.layers
    plain = dataclasses.replace(decoder, layers=[first, last, last])
    stacked = folded(plain, jnp.stack)
    assert stacked.layers.count == 2
    ids = tiny.tokens(2, 6)
    ones = np.ones_like(ids)
    got, _ = in_pieces(stacked, ids, ones, Runtime(), ((0, 4), (4, 5), (5, 6)))
    np.testing.assert_allclose(got, forward(plain, ids, runtime=Runtime()).logits, atol=5e-5)


def test_there_are_no_pages_of_it():
    runtime = Runtime(cache=CacheSettings(layout="paged"))
    with pytest.raises(CacheError, match="Latent attention has no pages"):
        tiny.model("deepseek_v2").module.cache_shapes(1, 8, runtime=runtime)


@pytest.mark.exhaustive
def test_values_may_be_narrower_than_keys():
    attn = tiny.model("deepseek_v3").module.layers[0].self_attn
    narrow = dataclasses.replace(
        attn,
        v_b_proj=dataclasses.replace(attn.v_b_proj, weight=attn.v_b_proj.weight[:, :7]),
        o_proj=dataclasses.replace(attn.o_proj, weight=attn.o_proj.weight[..., :7]),
    )
    assert narrow.sizes == (4, 4, 24, 7)
    model = tiny.model("deepseek_v3").module
    layers = [dataclasses.replace(layer, self_attn=narrow) for layer in model.layers]
    model = dataclasses.replace(model, layers=layers)
    ids = tiny.tokens(1, 6)
    want = forward(model, ids, runtime=Runtime()).logits
    got, _ = in_pieces(model, ids, np.ones_like(ids), Runtime(), ((0, 5), (5, 6)))
    np.testing.assert_allclose(got, want, atol=5e-5)

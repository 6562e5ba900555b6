"""What a model may be called with, and how its settings reach the numbers."""

from __future__ import annotations

import dataclasses
import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxen
from flaxen.core.errors import ConfigError, InputError
from flaxen.core.tree import paths
from flaxen.layers.runtime import Runtime, WeightSettings
from flaxen.pretrained import from_config

IDS = np.arange(1, 9, dtype=np.int32)[None]


@functools.cache
def model() -> flaxen.Model:
    return from_config(golden.case("llama").config, seed=1)


@functools.cache
def plain() -> np.ndarray:
    return np.asarray(model()(IDS).logits)


def run_as(**weights) -> flaxen.Model:
    return model().replace(runtime=Runtime(weights=WeightSettings(**weights)))


@pytest.mark.parametrize("wrapped", [False, True])
def test_weights_of_the_caller_stand_in_for_its_own(wrapped):
    other = jax.tree.map(lambda x: x * 0.5, model().module)
    params = {"params": other} if wrapped else other
    got = model()(IDS, params=params, add_params_field=wrapped).logits
    np.testing.assert_array_equal(got, model().replace(module=other)(IDS).logits)
    assert not np.allclose(got, plain())


@pytest.mark.parametrize("params", [{"params": {}}, {}, [1]])
def test_weights_of_another_structure_are_refused(params):
    with pytest.raises(InputError, match="params"):
        model()(IDS, params=params)


def test_a_tuple_has_what_there_is_in_order():
    out = model()(IDS, labels=IDS, output_hidden_states=True, return_dict=False)
    named = model()(IDS, labels=IDS, output_hidden_states=True)
    assert len(out) == 3
    np.testing.assert_array_equal(out[0], named.loss)
    np.testing.assert_array_equal(out[1], named.logits)
    assert len(out[2]) == len(named.hidden_states)


@pytest.mark.parametrize("scan", [False, True])
def test_attentions_mix_the_values_as_the_layer_did(scan):
    run = from_config(golden.case("llama").config, seed=1, scan_layers=scan)
    mask = np.array([[0, 0, 1, 1, 1, 1, 1, 1]])
    out = run(IDS, mask, output_attentions=True)
    weights = np.asarray(out.attentions[1])
    assert weights.shape == (1, 4, 8, 8)
    np.testing.assert_allclose(weights[0, :, 2:].sum(-1), 1, rtol=1e-5)
    assert (weights[..., :2] == 0).all()
    assert (np.triu(weights, 1) == 0).all()
    assert out.hidden_states is None


def test_attentions_are_those_of_the_paper():
    """The first layer's, in float64 from its own projections."""
    out = model()(IDS, output_attentions=True, output_hidden_states=True)
    layer = model().module.layers[0]
    ctx = model().module.context(
        jnp.arange(8)[None],
        flaxen.attention.Scene(q_slots=jnp.arange(8), k_slots=jnp.arange(8)),
        Runtime(),
    )
    q, k, _ = layer.self_attn.projected(layer.input_layernorm(out.hidden_states[0]), ctx)
    q, k = (np.asarray(x, np.float64) for x in (q, np.repeat(k, 2, 2)))
    s = np.einsum("btnh,bsnh->bnts", q, k) * layer.self_attn.scale
    s = np.where(np.tri(8, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    np.testing.assert_allclose(out.attentions[0], p / p.sum(-1, keepdims=True), atol=1e-5)


def test_an_extra_embedding_is_added_where_the_mask_says():
    width = model().config.hidden_size
    table = np.asarray(model().module.embed_tokens.weight)
    other = np.array([[9, 10, 11, 12, 5, 6, 7, 8]])
    extra = table[other] - table[IDS] + np.float32(0)
    got = model()(IDS, extra_embedding=extra).logits
    np.testing.assert_allclose(got, model()(other).logits, atol=1e-4)
    masked = model()(IDS, extra_embedding=np.ones((1, 8, width)), vision_mask=0 * IDS).logits
    np.testing.assert_array_equal(masked, plain())
    cached = model()(IDS, extra_embedding=extra, past_key_values=model().init_cache(1, 8)).logits
    np.testing.assert_allclose(cached, got, atol=1e-4)
    with pytest.raises(InputError, match="extra_embedding is .* expected floats of shape"):
        model()(IDS, extra_embedding=extra[:, 1:])
    with pytest.raises(InputError, match="vision_mask"):
        model()(IDS, vision_mask=IDS)


def test_numbers_are_dropped_only_in_training_and_by_the_key():
    config = golden.case("llama").config | {"attention_dropout": 0.5}
    drops = from_config(config, seed=1)
    key = jax.random.key(0)
    train = lambda model, key: np.asarray(model(IDS, dropout_rng=key, train=True).logits)
    np.testing.assert_array_equal(drops(IDS, dropout_rng=key).logits, plain())
    first = train(drops, key)
    assert not np.allclose(first, plain(), atol=1e-4)
    np.testing.assert_array_equal(train(drops, key), first)
    assert not np.allclose(train(drops, jax.random.key(1)), first, atol=1e-4)
    folded = from_config(config, seed=1, scan_layers=True)
    np.testing.assert_allclose(train(folded, key), first, atol=1e-5)
    with pytest.raises(InputError, match="dropout_rng is None"):
        drops(IDS, train=True)
    np.testing.assert_array_equal(model()(IDS, train=True).logits, plain())


def test_activations_are_in_the_dtype_that_is_asked_for():
    out = run_as(dtype="bfloat16")(IDS, output_hidden_states=True)
    assert {x.dtype for x in out.hidden_states} == {jnp.bfloat16.dtype}
    assert out.logits.dtype == jnp.bfloat16
    stored = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model().module)
    np.testing.assert_array_equal(out.logits, model().replace(module=stored)(IDS).logits)
    assert run_as(dtype="bfloat16").init_cache(1, 4).layers[0].k.dtype == jnp.bfloat16


def test_products_have_the_precision_that_is_asked_for():
    text = lambda m: str(jax.make_jaxpr(lambda m: m(IDS).logits)(m))
    assert "HIGHEST" not in text(model())
    assert text(run_as(precision="highest")).count("HIGHEST") >= 8


def test_fresh_weights_depend_neither_on_mesh_nor_on_folding():
    config = golden.case("llama").config
    wanted = paths(model().module)
    empty = from_config(config, abstract=True, mesh="fsdp=2,tp=4")
    filled = paths(empty.init_weights(1).module)
    again = paths(empty.init_weights(jax.random.key(1), (2, 3)).module)
    for path, x in wanted.items():
        np.testing.assert_array_equal(filled[path], x)
        np.testing.assert_array_equal(again[path], x)
    folded = from_config(config, abstract=True, scan_layers=True).init_weights(1)
    body = folded.module.layers.body[0].mlp.up_proj.weight
    np.testing.assert_array_equal(body[1], wanted["layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize("dtype", [bool, np.int32, np.int64])
def test_steps_with_prepared_inputs_equal_generation(dtype):
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype)
    ids = np.array([[7, 7, 1, 2, 3], [4, 5, 6, 7, 8]])
    kwargs = model().prepare_inputs_for_generation(ids, 8, mask)
    assert kwargs["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert kwargs["attention_mask"].shape == (2, 8)
    tokens, found = ids, []
    for _ in range(3):
        out = model()(tokens, **kwargs)
        tokens = np.asarray(out.logits[:, -1].argmax(-1))[:, None]
        found.append(tokens)
        kwargs = model().update_inputs_for_generation(out, kwargs)
    wanted = model().generate(ids, mask, max_new_tokens=3, eos_token_id=())[:, 5:]
    np.testing.assert_array_equal(np.concatenate(found, 1), wanted)


def test_right_padding_counts_real_tokens():
    mask = np.array([[1, 1, 1, 0, 0]])
    kwargs = model().prepare_inputs_for_generation(IDS[:, :5], 7, mask)
    assert kwargs["position_ids"].tolist() == [[0, 1, 2, 2, 2]]
    kwargs = model().update_inputs_for_generation(model()(IDS[:, :5], **kwargs), kwargs)
    assert kwargs["position_ids"].tolist() == [[3]]
    got = model()(np.array([[9]]), **kwargs).logits
    alone = model()(np.array([[1, 2, 3, 9]])).logits[:, -1:]
    np.testing.assert_allclose(got, alone, atol=1e-5)


def test_one_token_needs_no_mesh_around_the_call():
    spread = from_config(golden.case("llama").config, seed=1, mesh="fsdp=2,tp=2,sp=2")
    np.testing.assert_allclose(spread(IDS[:, :1]).logits, plain()[:, :1], atol=1e-5)


def test_a_server_uses_up_the_cache_it_is_given():
    serving = model().replace(runtime=dataclasses.replace(Runtime(), purpose="serve"))
    cache = serving.init_cache(1, 8)
    serving(IDS, past_key_values=cache)
    assert cache.layers[0].k.is_deleted()


def test_a_runtime_is_saved_beside_and_read_back_when_asked(tmp_path):
    runtime = Runtime(scan_layers=True, weights=WeightSettings(dtype="bfloat16"))
    run = model().replace(runtime=runtime)
    run.save(tmp_path / "plain")
    assert not (tmp_path / "plain" / "flaxen.json").exists()
    model().replace(runtime=runtime).save(tmp_path / "both", runtime=True)
    again = flaxen.load(tmp_path / "both", runtime=tmp_path / "both")
    assert again.runtime == runtime
    assert again.module.layers.count == 2
    other = flaxen.load(tmp_path / "both", runtime=tmp_path / "both", scan_layers=False)
    assert other.runtime == dataclasses.replace(runtime, scan_layers=False)
    assert flaxen.load(tmp_path / "both").runtime == Runtime()
    with pytest.raises(ConfigError, match="runtime=True"):
        flaxen.load(tmp_path / "plain", runtime=tmp_path / "plain")


@pytest.mark.parametrize("config", [None, [], 5])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(ConfigError, match="expected a dict with a model_type"):
        from_config(config)

"""What documented models give, refuse and leave alone."""

from __future__ import annotations

import functools
import re

import golden
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from flaxen.core.errors import ConfigError
from flaxen.easydel import (
    AutoEasyDeLModelForCausalLM,
    EasyDeLFlaxPretrainedModel,
    EasyDeLPretrainedConfig,
)
from flaxen.shard import PLANS, MeshSpec, Placement, Plan

IDS = np.arange(1, 9, dtype=np.int32)[None]
CONFIG = golden.case("llama").config


@functools.cache
def small() -> EasyDeLFlaxPretrainedModel:
    return EasyDeLFlaxPretrainedModel(EasyDeLPretrainedConfig(CONFIG, axis_dims="fsdp=2,tp=-1"))


def test_what_gives_a_model_gives_one_of_documented_names():
    model = small()
    larger = model.resize_token_embeddings(160)
    assert type(larger) is EasyDeLFlaxPretrainedModel
    assert (larger.config.vocab_size, model.config.vocab_size) == (160, 128)
    assert larger.config.runtime == model.config.runtime
    again = model.set_input_embeddings(model.get_input_embeddings())
    assert type(again) is EasyDeLFlaxPretrainedModel
    np.testing.assert_array_equal(again(IDS).logits, model(IDS).logits)
    assert model.quantize(8).config.bits == 8
    assert model.quantize({"embed": 8}).dtype == jnp.float32


@pytest.mark.parametrize("name", ["cudnn", "tokamax"])
def test_a_mechanism_that_cannot_run_here_is_refused_when_the_model_is_made(name):
    config = EasyDeLPretrainedConfig(CONFIG, attn_mechanism=name)
    with pytest.raises(ConfigError, match=f"'{name}' cannot run here"):
        EasyDeLFlaxPretrainedModel(config, _do_init=False)


def test_loading_leaves_the_given_config_as_it_is(tmp_path):
    config = EasyDeLPretrainedConfig(CONFIG, scan_attention_layers=False)
    golden.write_folder(golden.case("llama"), tmp_path)
    load = AutoEasyDeLModelForCausalLM.from_pretrained
    assert load(tmp_path, config=config, block_q=64).config.block_q == 64
    assert config.block_q == 128


def test_a_misspelt_name_is_met_with_the_right_one(tmp_path):
    golden.write_folder(golden.case("llama"), tmp_path)
    with pytest.raises(ConfigError, match="'blck_q' is unknown. Did you mean 'block_q'"):
        AutoEasyDeLModelForCausalLM.from_pretrained(tmp_path, blck_q=64)
    with pytest.raises(AttributeError, match="Did you mean 'attn_mechanism'"):
        _ = EasyDeLPretrainedConfig(CONFIG).attn_mecanism


@pytest.mark.parametrize("fully", [True, False])
def test_partition_rules_say_where_each_weight_lies(fully):
    config = EasyDeLPretrainedConfig(CONFIG, axis_dims="fsdp=2,tp=2,dp=2")
    rules = config.get_partition_rules(fully_sharded_data_parallel=fully)
    model = EasyDeLFlaxPretrainedModel(config, _do_init=False)
    plan = PLANS["auto" if fully else "tp"]
    place = Placement(MeshSpec("fsdp=2,tp=2,dp=2"), Plan(plan.weights, PLANS["auto"].activations))
    for path, weight in model.parameters().items():
        spec = next(spec for rule, spec in rules if re.search(rule, path))
        wanted = place.weight(weight)
        assert NamedSharding(place.mesh, spec).is_equivalent_to(wanted, weight.ndim)

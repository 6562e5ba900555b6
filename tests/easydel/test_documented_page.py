"""A program written from the documented page, and the faults that must not come back."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys

import golden
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from flaxen.core.errors import ConfigError, FlaxenError
from flaxen.core.tree import paths
from flaxen.easydel import (
    AutoEasyDeLConfig,
    AutoEasyDeLModelForCausalLM,
    EasyDeLFlaxPretrainedModel,
    EasyDeLPretrainedConfig,
    EasyDeLState,
)
from flaxen.easydel.names import FIELDS, NAMES
from flaxen.layers.rope import rope
from flaxen.layers.runtime import Runtime
from flaxen.shard import PLANS, MeshSpec, Placement

IDS = np.arange(1, 9, dtype=np.int32)[None]
CONFIG = golden.case("llama").config


@functools.cache
def small() -> EasyDeLFlaxPretrainedModel:
    config = EasyDeLPretrainedConfig(CONFIG, axis_dims="fsdp=2,tp=2,dp=2", backend="cpu")
    return EasyDeLFlaxPretrainedModel(config, seed=1, dtype=jnp.float32, param_dtype=jnp.float32)


def test_a_program_of_the_documented_page_runs(tmp_path):
    model = small()
    params = model.params
    assert model.config.create_mesh() == model.config.jax_mesh() == model.mesh
    logits = model(IDS, params=params).logits
    assert model(IDS, params={"params": params}, add_params_field=True, return_dict=False)
    kwargs = model.prepare_inputs_for_generation(IDS, 11, np.ones_like(IDS))
    tokens, found = IDS, []
    for _ in range(3):
        out = model(tokens, params=params, **kwargs)
        tokens = np.asarray(out.logits[:, -1].argmax(-1))[:, None]
        found.append(tokens)
        kwargs = model.update_inputs_for_generation(out, kwargs)
    wanted = model.generate(IDS, max_new_tokens=3, eos_token_id=())[:, 8:]
    np.testing.assert_array_equal(np.concatenate(found, 1), wanted)
    assert model.init_cache(2, 16).capacity == 16

    model.save_pretrained(tmp_path / "saved", params=params)
    again = AutoEasyDeLModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.runtime == model.config.runtime
    assert again.mesh.shape == model.mesh.shape
    np.testing.assert_allclose(again(IDS).logits, logits, atol=1e-5)


@pytest.mark.exhaustive
def test_a_state_goes_on_where_it_was_saved(tmp_path):
    tx = optax.adam(1e-2)
    state = small().to_easydel_state(small().params, tx=tx)

    @jax.jit
    def gradient(params):
        return jax.grad(lambda p: state.apply_fn(IDS, params=p, labels=IDS).loss)(params)

    state = state.apply_gradients(gradient(state.params))
    state.save_state(tmp_path)
    resumed = EasyDeLState.load_state(tmp_path, tx=tx)
    assert int(resumed.step) == 1
    assert resumed.runtime == state.runtime
    assert resumed.model.config.to_dict() == small().model.config.to_dict()
    for here, there in ((state, resumed),):
        here, there = (x.apply_gradients(gradient(x.params)) for x in (here, there))
        for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    np.testing.assert_allclose(
        resumed.apply_fn(IDS, params=resumed.params).logits,
        small()(IDS, params=state.params).logits,
    )
    placed = Runtime(placement=Placement(MeshSpec("tp=2"), PLANS["auto"]), scan_layers=True)
    moved = resumed.shard_params(placed)
    assert moved.params.embed_tokens.weight.sharding.spec == P("tp", None)
    np.testing.assert_array_equal(
        moved.params.embed_tokens.weight, resumed.params.embed_tokens.weight
    )


def test_a_state_without_an_optimiser_says_so():
    with pytest.raises(ConfigError, match="no optimiser"):
        small().to_easydel_state().apply_gradients(None)


def test_the_documented_defaults():
    config = EasyDeLPretrainedConfig()
    whole, one = P(("dp", "fsdp"), "sp", "tp", None), P(("dp", "fsdp"), None, "tp", None)
    bias = P(("dp", "fsdp"), None, None, None)
    wanted = {
        "axis_dims": (1, -1, 1, 1),
        "axis_names": ("dp", "fsdp", "tp", "sp"),
        "backend": None,
        "attn_mechanism": "sharded_vanilla",
        "block_q": 128,
        "block_k": 128,
        "block_b": 1,
        "query_partition_spec": whole,
        "key_partition_spec": whole,
        "value_partition_spec": whole,
        "attention_partition_spec": whole,
        "generation_query_partition_spec": one,
        "generation_attention_partition_spec": one,
        "bias_partition_spec": bias,
        "generation_bias_partition_spec": bias,
        "attention_axis_name": "sp",
        "scan_ring_attention": True,
        "flash_attention_backward_pass_impl": "triton",
        "shard_attention_computation": True,
        "use_sharding_constraint": False,
        "use_sharded_kv_caching": True,
        "quantize_kv_cache": False,
        "use_scan_mlp": False,
        "scan_mlp_chunk_size": 1024,
        "scan_attention_layers": True,
        "bits": None,
        "easy_method": "train",
    }
    assert {name: getattr(config, name) for name in wanted} == wanted
    assert config.get_backend() == "cpu"
    assert config.get_axis_dims() == (1, 8, 1, 1)
    assert config.get_axis_names() == ("dp", "fsdp", "tp", "sp")


OTHER = {
    "attn_mechanism": "blockwise",
    "attention_axis_name": "tp",
    "scan_ring_attention": False,
    "flash_attention_backward_pass_impl": "xla",
    "shard_attention_computation": False,
    "use_sharding_constraint": True,
    "use_sharded_kv_caching": False,
    "use_scan_mlp": True,
    "scan_mlp_chunk_size": 7,
    "scan_attention_layers": False,
    "bits": 8,
    "easy_method": "serve",
}


def another(name):
    if name.startswith("block_"):
        return 32
    return P(None, "tp") if name.endswith("_spec") else OTHER[name]


@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"quantize_kv_cache"}))
def test_a_name_sets_itself_and_keeps_all_others(name):
    config, before = EasyDeLPretrainedConfig(), EasyDeLPretrainedConfig()
    config.add_jax_args(**{name: another(name)})
    assert getattr(config, name) == another(name)
    for other in set(NAMES) - {name}:
        assert getattr(config, other) == getattr(before, other)


def test_the_cache_is_quantised_by_its_documented_name():
    config = EasyDeLPretrainedConfig(quantize_kv_cache=True)
    assert (config.runtime.cache.codec, config.quantize_kv_cache) == ("int8", True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attn_mecanism": "ring"}, "Did you mean 'attn_mechanism'"),
        ({"hiden_size": 3}, "Did you mean 'hidden_size'"),
        ({"axis_dims": {"fsd": 2}}, "Did you mean 'fsdp'"),
        ({"query_partition_spec": P("tp", "tp")}, "twice"),
        ({"bits": 5}, "^bits: weights.bits is 5"),
        ({"easy_method": "trian", "block_q": 1}, "^easy_method: purpose is 'trian'"),
        ({"use_scan_mlp": 1}, "^use_scan_mlp: mlp.scan is 1"),
        ({"use_sharded_kv_caching": None}, "^use_sharded_kv_caching: cache.sharded is None"),
        ({"scan_ring_attention": "yes"}, "^scan_ring_attention: attention.scan_ring is 'yes'"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(given, words):
    with pytest.raises(FlaxenError, match=words):
        EasyDeLPretrainedConfig(CONFIG, **given)


def test_the_two_halves_are_saved_apart_and_come_back(tmp_path):
    config = EasyDeLPretrainedConfig(CONFIG, axis_dims="tp=-1", block_q=64)
    config.rms_norm_eps = 1e-4
    config.bits = 4
    config.save_pretrained(tmp_path)
    again = AutoEasyDeLConfig.from_pretrained(tmp_path)
    assert again.runtime == config.runtime
    assert (again.bits, again.block_q, again.rms_norm_eps) == (4, 64, 1e-4)
    said = json.loads((tmp_path / "config.json").read_text())
    assert not set(said) & set(NAMES)
    assert "placement.on.axis_dims = (1, 1, -1, 1)" in repr(again)


def test_loading_keeps_what_the_checkpoint_says(tmp_path):
    """A theta of 500000, tied embeddings, a bias, an activation: in both generations' spelling."""
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    said = {"tie_word_embeddings": True, "attention_bias": True, "hidden_act": "relu"}
    base = {k: v for k, v in CONFIG.items() if k not in ("rope_parameters", "rope_theta")}
    logits = []
    for spelled in (newer, {"rope_theta": 5e5, "rope_scaling": None}):
        (tmp_path / "config.json").write_text(json.dumps(base | said | spelled))
        config = AutoEasyDeLConfig.from_pretrained(tmp_path, axis_dims=(1, 1, 1, 1))
        assert config.rope_parameters["rope_theta"] == 5e5
        assert {name: getattr(config, name) for name in said} == said
        model = EasyDeLFlaxPretrainedModel(config, seed=2)
        parts = model.model.module
        assert parts.lm_head is None
        assert parts.layers.body[0].self_attn.q_proj.bias is not None
        assert parts.layers.body[0].mlp.act == "relu"
        turned = rope({"rope_type": "default", "rope_theta": 5e5}, 16, 64)
        assert parts.layers.body[0].self_attn.rope == turned
        logits.append(model(IDS).logits)
    np.testing.assert_array_equal(*logits)


def test_a_default_config_runs_16_tokens_of_one_row_on_8_devices():
    model = EasyDeLFlaxPretrainedModel(EasyDeLPretrainedConfig(CONFIG))
    assert model.mesh.size == 8
    assert model(np.arange(16)[None]).logits.shape == (1, 16, 128)
    assert "fsdp': 8" in repr(model) and "sharded_vanilla" in repr(model)


@pytest.mark.parametrize("fully", [True, False])
def test_partition_rules_cover_every_weight_once(fully):
    config = EasyDeLPretrainedConfig(CONFIG, axis_dims="fsdp=2,tp=2,dp=2")
    rules = config.get_partition_rules(fully_sharded_data_parallel=fully)
    model = EasyDeLFlaxPretrainedModel(config, _do_init=False)
    assert rules[-1] == (".*", P())
    for path, weight in model.parameters().items():
        for text in (path, path.replace(".", "/")):
            spec = next(spec for rule, spec in rules if re.search(rule, text))
            used = [axis for axis in spec if axis is not None]
            assert len(used) == len(set(used))
            if "norm" in path:
                assert spec == P()
            elif weight.ndim > 2:
                assert ("fsdp" in used) == fully
                assert "tp" in used


def test_what_does_not_divide_is_reported():
    config = EasyDeLPretrainedConfig(CONFIG, axis_dims="tp=8")
    with pytest.warns(UserWarning) as said:
        config.get_partition_rules()
    notes = [str(one.message) for one in said]
    assert "kv_heads=2 does not divide by tp=8: whole on every device" in notes


def test_an_abstract_model_is_filled_when_asked():
    model = EasyDeLFlaxPretrainedModel(small().config, _do_init=False, param_dtype="bfloat16")
    with pytest.raises(FlaxenError, match="abstract"):
        model(IDS)
    params = model.init_weights(jax.random.key(1), (1, 4))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.bfloat16.dtype}
    wanted = paths(small().params)
    for path, x in paths(params).items():
        np.testing.assert_array_equal(x, wanted[path].astype(jnp.bfloat16))


SCRIPT = """
import json, os
before = dict(os.environ)
import flaxen.easydel
flaxen.easydel.EasyDeLPretrainedConfig(attn_mechanism="vanilla", axis_dims="tp=-1")
from jax._src import xla_bridge
print(json.dumps([before == dict(os.environ), sorted(xla_bridge._backends)]))
"""


def test_importing_starts_no_backend_and_changes_nothing():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [True, []]

"""What holds for every family: one dtype throughout, the config's activation, equal layers."""

from __future__ import annotations

import re

import golden
import jax
import numpy as np
import pytest
from golden_meshes import marked

from flaxen.core.tree import is_param
from flaxen.families.config import abstract_module, hf_config
from flaxen.layers.mlp import ACTIVATIONS
from flaxen.layers.runtime import PLAIN
from flaxen.models.causal import forward, mean_loss
from flaxen.models.fold import repetition
from flaxen.pretrained import from_config

IDS = np.zeros((1, 4), np.int32)


@pytest.mark.parametrize("name", marked(golden.cases()))
def test_a_float32_model_is_float32_throughout(name):
    module = abstract_module(hf_config(golden.about(name)["config"]))[0]
    shapes = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, np.float32), module, is_leaf=is_param
    )
    train = jax.grad(lambda module: mean_loss(module, IDS, IDS, runtime=PLAIN))
    run = lambda module: forward(module, IDS, runtime=PLAIN).logits
    for program in (train, run):
        text = str(jax.make_jaxpr(program)(shapes))
        assert "f32[" in text
        assert re.findall(r"\b(?:bf16|f16|f64)\b", text) == []


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama", "hidden_act"),
        ("gemma3_text", "hidden_activation"),
        ("gpt2", "activation_function"),
    ],
)
@pytest.mark.parametrize("act", ["relu", "gelu", "tanh"])
def test_the_activation_is_the_one_of_the_config(name, key, act):
    config = golden.about(name)["config"] | {key: act}
    layers = abstract_module(hf_config(config))[0].layers
    assert {layer.mlp.act for layer in layers} == {act}


def test_activations_are_their_formulas():
    x = np.linspace(-4, 4, 41)
    inner = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    sigmoid = 1 / (1 + np.exp(-x))
    truth = {"silu": x * sigmoid, "relu": np.maximum(x, 0), "tanh": np.tanh(x), "sigmoid": sigmoid}
    truth |= {"gelu_pytorch_tanh": 0.5 * x * (1 + inner), "gelu_new": 0.5 * x * (1 + inner)}
    for name, want in truth.items():
        np.testing.assert_allclose(ACTIVATIONS[name](x.astype(np.float32)), want, atol=1e-5)


def test_equal_layers_compare_equal():
    one, two = (abstract_module(hf_config(golden.about("llama")["config"]))[0] for _ in range(2))
    assert one == two
    assert one.layers[0] == one.layers[1]
    assert repetition([jax.tree.structure(x, is_leaf=is_param) for x in one.layers])[2] > 1


def test_one_row_of_odd_length_runs_on_a_mesh_of_many_rows():
    config = {"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
    config |= {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    ids = np.arange(7, dtype=np.int32)[None]
    one, many = (from_config(config, mesh=mesh) for mesh in (None, "fsdp=8"))
    np.testing.assert_allclose(many(ids).logits, one(ids).logits, atol=1e-6)

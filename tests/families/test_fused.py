"""Projections that share a tensor in the file, or lie there the other way round."""

from __future__ import annotations

import json

import golden
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_decoder import filled, tiny

import flaxen
from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.place import place
from flaxen.convert.relation import relate
from flaxen.core.errors import ConfigError
from flaxen.core.tree import is_param, paths
from flaxen.families import find
from flaxen.families.config import abstract_module, hf_config
from flaxen.models.causal import forward
from flaxen.shard import placement_on
from flaxen.tune import adapters, add_lora, load_adapter, merge, save_adapter

Q, K, V = range(48), range(48, 60), range(60, 72)
ATTN = "layers.0.self_attn.{}_proj.weight"


@pytest.fixture(scope="module")
def fused():
    """4 query heads and 1 key head of 12 channels; row r of the tensor is filled with r."""
    raw = {
        "model_type": "phi3",
        "vocab_size": 16,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
    }
    module, family, _ = abstract_module(hf_config(raw))
    relation = relate(module, family.names)
    arrays = {
        name: np.broadcast_to(np.arange(shape[0], dtype=np.float32)[:, None], shape)
        if len(shape) == 2
        else np.ones(shape, np.float32)
        for name, shape in relation.shapes().items()
    }
    tensors = {name: ArrayTensor(array) for name, array in arrays.items()}
    return module, relation, arrays, relation.load(tensors)


def test_rows_of_q_k_and_v_are_counted_in_heads(fused):
    *_, arrays, weights = fused
    assert arrays["model.layers.0.self_attn.qkv_proj.weight"].shape == (72, 32)
    for letter, rows, heads in (("q", Q, 4), ("k", K, 1), ("v", V, 1)):
        got = weights[ATTN.format(letter)].read()
        assert got.shape == (heads, 12, 32)
        np.testing.assert_array_equal(got[..., 0].ravel(), rows)


def test_gate_lies_above_up(fused):
    *_, weights = fused
    gate, up = (weights[f"layers.0.mlp.{part}_proj.weight"].read() for part in ("gate", "up"))
    np.testing.assert_array_equal(gate[:, 0], range(20))
    np.testing.assert_array_equal(up[:, 0], range(20, 40))


def test_saving_fuses_exactly_as_before(fused):
    _, relation, arrays, weights = fused
    back = relation.save(weights)
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name].read(), array, err_msg=name)


def test_two_devices_hold_two_query_heads_each_and_both_the_key_head(fused):
    module, _, _, weights = fused
    placement = placement_on("tp=2,dp=4")
    params = paths(module, is_param)
    where = {path: placement.weight(params[path]) for path in weights}
    placed = place(weights, where)
    halves = {
        tuple(np.asarray(s.data)[..., 0].ravel().astype(int))
        for s in placed[ATTN.format("q")].addressable_shards
    }
    assert halves == {tuple(range(24)), tuple(range(24, 48))}
    for shard in placed[ATTN.format("k")].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data)[0, :, 0], K)


GPT2 = find("gpt2").names


@pytest.fixture(scope="module")
def gpt2():
    """Both `c_proj` have an adapter; that of attention is square."""
    return tiny("gpt2", folded=False), filled(
        add_lora(
            tiny("gpt2", folded=False).module, rank=4, alpha=8, targets=["o_proj", "down_proj"]
        )
    )


def logits(model, module):
    ids = golden.case("gpt2").arrays["full_input_ids"]
    return np.asarray(forward(module, ids, runtime=model.runtime).logits)


def test_merging_an_adapter_into_a_turned_weight_changes_nothing(gpt2):
    model, adapted = gpt2
    with_adapter = logits(model, adapted)
    assert np.abs(with_adapter - logits(model, model.module)).max() > 0.1
    np.testing.assert_allclose(logits(model, merge(adapted)), with_adapter, atol=1e-4)


def test_the_merged_model_saves_pefts_sum(gpt2, tmp_path):
    """In a file of [in, out] matrices the adapter's product is added transposed."""
    _, adapted = gpt2
    case = golden.case("gpt2")
    loaded = flaxen.load(golden.write_folder(case, tmp_path / "base"))
    leaf = adapted.layers[1].self_attn.o_proj.weight
    loaded.replace(module=merge(adapted)).save(tmp_path / "merged")
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    name = "transformer.h.1.attn.c_proj.weight"
    change = np.asarray(leaf.b) @ np.asarray(leaf.a).reshape(4, -1)
    np.testing.assert_allclose(saved[name], case.weights[name] + 2 * change.T, atol=1e-5)


def test_an_adapter_folder_says_that_matrices_are_turned(gpt2, tmp_path):
    model, adapted = gpt2
    save_adapter(adapted, tmp_path, GPT2, alpha=8, fan_in_fan_out=True)
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    assert about["fan_in_fan_out"] is True
    assert about["target_modules"] == ["c_proj"]
    shapes = {k: v.shape for k, v in load_file(tmp_path / "adapter_model.safetensors").items()}
    key = "base_model.model.transformer.h.0.mlp.c_proj.lora_{}.weight"
    assert shapes[key.format("A")] == (4, 256)
    assert shapes[key.format("B")] == (64, 4)
    again = load_adapter(model.module, tmp_path, GPT2)
    jax.tree.map(np.testing.assert_array_equal, again, adapted)


def test_a_target_is_named_apart_from_one_of_the_same_last_word(tmp_path):
    adapted = add_lora(tiny("gpt2", folded=False).module, rank=2, alpha=8, targets=["o_proj"])
    save_adapter(adapted, tmp_path, GPT2, alpha=8, fan_in_fan_out=True)
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    assert about["target_modules"] == ["attn.c_proj"]


def test_an_adapter_on_a_part_of_a_fused_tensor_is_not_saved(tmp_path):
    adapted = add_lora(tiny("gpt2", folded=False).module, rank=2, targets=["q_proj"])
    with pytest.raises(ConfigError, match=r"self_attn\.q_proj.*part of a larger one"):
        save_adapter(adapted, tmp_path, GPT2, alpha=8)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_default_targets_are_those_that_the_model_has(name):
    kinds = {p.split(".")[-2] for p in adapters(add_lora(tiny(name).module))}
    want = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert kinds == (want if name == "mixtral" else want | {"up_proj", "down_proj"})


def test_a_file_of_the_model_without_its_head(tmp_path):
    """As the oldest files are: no prefix, and masks beside the weights. Saved as it was read."""
    case = golden.case("gpt2")
    bare = {k.removeprefix("transformer."): v for k, v in case.weights.items()}
    masks = {f"h.{i}.attn.bias": np.tril(np.ones((1, 1, 64, 64), "f")) for i in range(2)}
    old = golden.Case("old", case.about, case.arrays, bare | masks)
    model = flaxen.load(golden.write_folder(old, tmp_path / "old"))
    out = model(case.arrays["full_input_ids"]).logits
    assert np.abs(np.asarray(out) - case.arrays["full_logits"]).max() < 5e-5
    model.save(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == bare.keys()
    assert all(np.array_equal(saved[name], array) for name, array in bare.items())

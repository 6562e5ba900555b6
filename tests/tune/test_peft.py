"""Adapter folders: names, shapes and settings as the PEFT library writes and reads them."""

from __future__ import annotations

import json

import golden
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_decoder import filled, logits, tiny

import flaxen
from flaxen.adapter import relation_of
from flaxen.core.errors import CheckpointError, ConfigError
from flaxen.families import find
from flaxen.tune import adapters, add_lora, load_adapter, save_adapter

NAMES = find("llama").names


@pytest.fixture
def folder(tmp_path):
    adapted = filled(add_lora(tiny().module, rank=4, alpha=8))
    return save_adapter(adapted, tmp_path, NAMES, alpha=8)


def test_files_have_pefts_names_and_shapes(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    config = tiny().config
    heads = config.num_attention_heads * config.head_dim
    key = "base_model.model.model.layers.1.self_attn.{}.lora_{}.weight"
    assert len(tensors) == 2 * 2 * 7
    assert tensors[key.format("q_proj", "A")].shape == (4, config.hidden_size)
    assert tensors[key.format("q_proj", "B")].shape == (heads, 4)
    assert tensors[key.format("o_proj", "A")].shape == (4, heads)
    about = json.loads((folder / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["use_rslora"]) == (4, 8, False)
    assert about["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


def test_who_may_read_the_config_may_read_the_weights(folder):
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert modes["adapter_model.safetensors"] == modes["adapter_config.json"]


def test_pefts_product_is_ours(folder):
    """W + alpha / r * B @ A on the flat matrices of the file is the adapter's weight."""
    tensors = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.self_attn.o_proj.lora_{}.weight"
    flat = 2 * tensors[key.format("B")] @ tensors[key.format("A")]
    leaf = load_adapter(tiny(folded=False).module, folder, NAMES).layers[1].self_attn.o_proj.weight
    np.testing.assert_allclose(
        flat.reshape(leaf.shape), leaf.scale * np.einsum("er,rnh->enh", leaf.b, leaf.a), atol=1e-6
    )


@pytest.mark.parametrize("folded", [False, True])
def test_a_saved_adapter_loads_into_folded_and_plain_models(folder, folded: bool):
    model = tiny(folded=folded)
    want = logits(tiny(), filled(add_lora(tiny().module, rank=4, alpha=8)))
    got = logits(model, load_adapter(model.module, folder, NAMES))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_layer_without_an_adapter_gets_zeros_in_a_folded_model(folder):
    file = folder / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if ".layers.1." in k}, file)
    loaded = adapters(load_adapter(tiny().module, folder, NAMES))
    leaf = loaded["layers.body.0.mlp.up_proj.weight"]
    assert not np.asarray(leaf.b[0]).any()
    assert np.asarray(leaf.b[1]).any()


def test_tensors_that_do_not_fit_are_named(folder):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"] = np.zeros((4, 3), "f")
    tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"] = np.zeros((4, 3), "f")
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"expected \(4, .*no place for .*layers\.7"):
        load_adapter(tiny().module, folder, NAMES)


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "LOHA"},
        {"bias": "all"},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"init_lora_weights": "pissa"},
        {"lora_bias": True},
        {"rank_pattern": {"q_proj": 0}},
        {"lora_dropout": 1.5},
    ],
)
def test_a_kind_of_adapter_we_cannot_follow_is_refused(folder, change):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=next(iter(change))):
        load_adapter(tiny().module, folder, NAMES)


@pytest.mark.parametrize(
    "change", [{"r": None}, {"r": 0}, {"r": 2.0}, {"lora_alpha": "8"}, {"lora_alpha": float("nan")}]
)
def test_a_scale_that_cannot_be_computed_is_refused(folder, change):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=f"says {next(iter(change))}=.*expected"):
        load_adapter(tiny().module, folder, NAMES)


@pytest.mark.parametrize("text", ["[]", "{", "\xff"])
def test_a_config_that_is_no_json_object_is_refused(folder, text):
    (folder / "adapter_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match="adapter_config.json"):
        load_adapter(tiny().module, folder, NAMES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "has no lora_magnitude_vector, and its config says use_dora=True"),
        ({"rank_pattern": {"q_proj": 2}}, r"q_proj.lora_A is \(4, 64\), expected \(2, 64\)"),
    ],
)
def test_tensors_that_are_not_what_the_config_says_are_refused(folder, change, words):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=words):
        load_adapter(tiny().module, folder, NAMES)


def test_parts_with_an_a_of_their_own_are_saved_as_blocks(tmp_path):
    """B A of the module is, row for row, that of each projection, and zeros elsewhere."""
    model = flaxen.load(golden.write_folder(golden.case("phi3"), tmp_path / "base"))
    grown = model.add_adapter(rank=4, alpha=8, targets=("q_proj", "v_proj", "o_proj"))
    grown = grown.replace(module=filled(grown.module))
    saved = grown.save_adapter(tmp_path / "adapter")
    tensors = load_file(saved / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.self_attn.{}.lora_{}.weight"
    a, b = tensors[key.format("qkv_proj", "A")], tensors[key.format("qkv_proj", "B")]
    assert (len(a), len(tensors[key.format("o_proj", "A")])) == (8, 4)
    attn = grown.module.layers[1].self_attn
    flat = lambda leaf: np.asarray(leaf.b).reshape(-1, 4) @ np.asarray(leaf.a)
    q, v = flat(attn.q_proj.weight), flat(attn.v_proj.weight)
    np.testing.assert_allclose(b @ a, np.concatenate([q, 0 * v, v]), atol=1e-6)
    about = json.loads((saved / "adapter_config.json").read_text())
    scale = lambda r, alpha: alpha / r
    qkv = "model.layers.1.self_attn.qkv_proj"
    ranks, alphas = about["rank_pattern"], about["alpha_pattern"]
    assert scale(ranks.get(qkv, about["r"]), alphas.get(qkv, about["lora_alpha"])) == 2


def test_an_alpha_that_is_not_the_adapters_is_refused(tmp_path):
    adapted = add_lora(tiny().module, rank=4, alpha=8)
    with pytest.raises(ConfigError, match="alpha is 7, but the adapters' scale says 8"):
        save_adapter(adapted, tmp_path, NAMES, alpha=7)


def test_half_of_an_adapter_is_refused_by_name(folder):
    file = folder / "adapter_model.safetensors"
    gone = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    save_file({k: v for k, v in load_file(file).items() if k != gone}, file)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj has only one of"):
        load_adapter(tiny().module, folder, NAMES)


def test_a_folder_without_an_adapter_says_what_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is not there"):
        load_adapter(tiny().module, tmp_path, NAMES)


def test_pissa_is_saved_as_a_plain_adapter_of_the_same_base(tmp_path):
    model = tiny()
    adapted = add_lora(model.module, rank=4, alpha=8, init="pissa", targets=("q_proj", "up_proj"))
    moved = filled(adapted)
    saved = save_adapter(moved, tmp_path, NAMES)
    assert json.loads((saved / "adapter_config.json").read_text())["r"] == 8
    again = load_adapter(model.module, saved, NAMES)
    np.testing.assert_allclose(logits(model, again), logits(model, moved), atol=2e-5)


def test_adapters_of_a_model_with_a_rank_of_its_own_come_back(tmp_path):
    """Mamba's step sizes are; it has none of the usual projections, so that all get adapters."""
    base = golden.write_folder(golden.case("mamba"), tmp_path / "base")
    model = flaxen.load(base, scan_layers=False)
    tree = filled(add_lora(model.module, rank=2, alpha=4))
    names = relation_of(model)
    folder = save_adapter(tree, tmp_path / "adapter", names)
    tensors = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.backbone.layers.1.mixer.dt_proj.lora_{}.weight"
    assert {name.split(".")[-3] for name in tensors} == {"in_proj", "x_proj", "dt_proj", "out_proj"}
    back = load_adapter(model.module, folder, names)
    want, got = adapters(tree), adapters(back)
    assert got.keys() == want.keys()
    for path, leaf in want.items():
        np.testing.assert_allclose(product(got[path]), product(leaf), atol=1e-6, err_msg=path)
    (path,) = (path for path in want if path.endswith("1.mixer.dt_proj.weight"))
    flat = 2 * tensors[key.format("B")] @ tensors[key.format("A")]
    np.testing.assert_allclose(product(want[path]), flat, atol=1e-6)


def product(leaf):
    """scale * b a of a projection of one layer, flat."""
    rank = len(leaf.a)
    return leaf.scale * np.reshape(leaf.b, (-1, rank)) @ np.reshape(leaf.a, (rank, -1))

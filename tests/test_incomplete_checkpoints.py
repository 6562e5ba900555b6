"""Checkpoints that lack a part, hold one twice, or differ in dtype: loaded and given back."""

from __future__ import annotations

import json

import golden
import numpy as np
import pytest
from given_back import assert_given_back, written
from safetensors.numpy import load_file

import flaxen
from flaxen.core.errors import CheckpointError


@pytest.fixture(scope="module")
def case():
    return golden.case("llama")


@pytest.mark.parametrize("mapping", [None, {r"^output\.": "lm_head."}])
def test_a_tied_head_that_stands_alone_is_saved_alone(case, tmp_path, mapping):
    """Of the two names only the head's is in the file, and stays."""
    weights = {k: v for k, v in case.weights.items() if k != "model.embed_tokens.weight"}
    if mapping:
        weights["output.weight"] = weights.pop("lm_head.weight")
    folder = written(case, weights, tmp_path / "in")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = flaxen.load(folder, key_mapping=mapping)
    assert model.loading.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert_given_back(model, weights, tmp_path / "out")


def test_a_named_group_is_renamed_back(case, tmp_path):
    odd = {k.replace("layers.", "h"): v for k, v in case.weights.items()}
    mapping = {r"h(?P<layer>\d+)": r"layers.\1"}
    model = flaxen.load(written(case, odd, tmp_path / "in"), key_mapping=mapping)
    assert_given_back(model, odd, tmp_path / "out")


@pytest.mark.parametrize("mapping", [[("a", "b")], {"a": None}, {3: "a"}, {"(?i)a": ""}, {"(": ""}])
def test_a_key_mapping_that_is_none_is_refused(case, tmp_path, mapping):
    with pytest.raises(CheckpointError, match="key_mapping"):
        flaxen.load(golden.write_folder(case, tmp_path / "in"), key_mapping=mapping)


def packed(case):
    """A mixture in the layout that Transformers has in memory."""
    old, new = "block_sparse_moe", "mlp"
    out = {k.replace(old, new): v for k, v in case.weights.items() if ".experts." not in k}
    for layer in range(case.config["num_hidden_layers"]):
        name = f"model.layers.{layer}.{old}.experts"
        w1, w2, w3 = (
            np.stack([case.weights[f"{name}.{i}.w{n}.weight"] for i in range(4)]) for n in (1, 2, 3)
        )
        name = name.replace(old, new)
        out |= {f"{name}.gate_up_proj": np.concatenate([w1, w3], 1), f"{name}.down_proj": w2}
    return out


def test_packed_experts_beside_single_ones_are_reported(tmp_path):
    mixture = golden.case("mixtral")
    name = "model.layers.0.mlp.experts.down_proj"
    weights = mixture.weights | {name: packed(mixture)[name] + 1}
    folder = written(mixture, weights, tmp_path / "both")
    with pytest.raises(CheckpointError, match=f"unexpected  {name}"):
        flaxen.load(folder)
    model = flaxen.load(folder, strict=False)
    assert_given_back(model, mixture.weights, tmp_path / "out")


def test_a_model_with_a_fresh_expert_is_saved_packed_as_the_others_were(tmp_path):
    mixture = golden.case("mixtral")
    weights, name = packed(mixture), "model.layers.0.mlp.experts.gate_up_proj"
    short = weights | {name: weights[name][:3]}
    model = flaxen.load(written(mixture, short, tmp_path / "in"), strict=False)
    model.save(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in weights.items()}
    np.testing.assert_array_equal(found[name][:3], weights[name][:3])
    assert np.isclose(found[name][3].std(), 0.02, rtol=0.1)


def test_layers_of_different_dtypes_are_not_folded_together(case, tmp_path):
    odd = {k: v.astype(np.float16) if ".layers.1." in k else v for k, v in case.weights.items()}
    model = flaxen.load(written(case, odd, tmp_path / "in"), scan_layers=True)
    assert_given_back(model, odd, tmp_path / "out")
    by_name = {"layers.0.": "float32", "*": "bfloat16"}
    again = flaxen.load(tmp_path / "in", scan_layers=True, dtype=by_name)
    assert str(again.parameters()["layers.1.mlp.up_proj.weight"].dtype) == "bfloat16"

"""Checkpoints of other names or layouts than the hub's: loaded, run, given back as they were."""

from __future__ import annotations

import golden
import numpy as np
import pytest
from given_back import assert_given_back, written

import flaxen
from flaxen.convert.ops import Concatenate, Split, Transpose
from flaxen.convert.transforms import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    register_checkpoint_conversion_mapping,
)
from flaxen.core.errors import CheckpointError, ConfigError, InputError

IDS = np.arange(8).reshape(1, 8)


@pytest.fixture(scope="module")
def case():
    return golden.case("llama")


@pytest.fixture(scope="module")
def logits(case, tmp_path_factory):
    folder = golden.write_folder(case, tmp_path_factory.mktemp("plain"))
    return np.asarray(flaxen.load(folder)(IDS).logits)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr("flaxen.convert.transforms.registry._MAPPINGS", {})
    return register_checkpoint_conversion_mapping


MAPPINGS = [
    ({r"^transformer\.": ""}, lambda k: f"transformer.{k}"),
    ({r"blocks\.(\d+)": r"layers.\1"}, lambda k: k.replace("layers.", "blocks.")),
    ({r"^(?!model|lm_head)": "model."}, lambda k: k.removeprefix("model.")),
]


@pytest.mark.parametrize("mapping, named", MAPPINGS)
def test_key_mapping_renames_at_load_and_back_at_save(case, logits, tmp_path, mapping, named):
    odd = {named(k): v for k, v in case.weights.items()}
    model = flaxen.load(written(case, odd, tmp_path / "odd"), key_mapping=mapping)
    np.testing.assert_array_equal(model(IDS).logits, logits)
    assert_given_back(model, odd, tmp_path / "again")
    again = flaxen.load(tmp_path / "again", key_mapping=mapping)
    assert_given_back(again, odd, tmp_path / "third")


def test_names_that_need_no_renaming_stay_as_they_are(case, logits, tmp_path):
    """A rule that adds a prefix does not add it twice."""
    mapping = {r"^layers\.": "model.layers.", "layers": "layers"}
    model = flaxen.load(written(case, case.weights, tmp_path / "in"), key_mapping=mapping)
    np.testing.assert_array_equal(model(IDS).logits, logits)
    assert_given_back(model, case.weights, tmp_path / "out")


def test_a_model_without_a_head_loads_and_keeps_its_names(case, tmp_path):
    tied = golden.Case("tied", {**case.about}, case.arrays, case.weights)
    tied.about["config"] = {**case.config, "tie_word_embeddings": True}
    base = {k.removeprefix("model."): v for k, v in case.weights.items() if k != "lm_head.weight"}
    model = flaxen.load(written(tied, base, tmp_path / "base"))
    assert_given_back(model, base, tmp_path / "again")


def fused(case):
    """q, k and v of each layer in one tensor, and down_proj the other way round."""
    weights = dict(case.weights)
    for i in range(case.config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        qkv = [weights.pop(f"{at}.self_attn.{x}_proj.weight") for x in "qkv"]
        weights[f"{at}.attention.wqkv.weight"] = np.concatenate(qkv)
        down = weights.pop(f"{at}.mlp.down_proj.weight")
        weights[f"{at}.mlp.down_proj_t.weight"] = np.ascontiguousarray(down.T)
    return weights


def converters():
    return [
        WeightConverter(
            ["attention.wqkv.weight"],
            [f"self_attn.{x}_proj.weight" for x in "qkv"],
            operations=[Split(dim=0)],
        ),
        WeightConverter(["down_proj_t"], ["down_proj"], operations=[Transpose(0, 1)]),
    ]


@pytest.mark.parametrize("name", ["llama", "LlamaForCausalLM"])
@pytest.mark.parametrize("mesh", [None, "tp=2,fsdp=4"])
def test_registered_converters_reshape_at_load_and_back_at_save(
    case, logits, tmp_path, registered, name, mesh
):
    registered(name, converters())
    odd = fused(case)
    model = flaxen.load(written(case, odd, tmp_path / "odd"), mesh=mesh)
    np.testing.assert_allclose(model(IDS).logits, logits, atol=1e-5)
    assert model.loading.bytes_read == sum(v.nbytes for v in odd.values())
    assert_given_back(model, odd, tmp_path / "again")


def test_registered_converters_leave_a_plain_checkpoint_alone(case, logits, tmp_path, registered):
    registered("llama", converters())
    model = flaxen.load(written(case, case.weights, tmp_path / "in"))
    assert_given_back(model, case.weights, tmp_path / "out")


def test_half_converted_checkpoints_load(case, logits, tmp_path, registered):
    registered("llama", converters())
    half = {k: v for k, v in case.weights.items() if ".layers.0." not in k}
    half |= {k: v for k, v in fused(case).items() if ".layers.0." in k}
    model = flaxen.load(written(case, half, tmp_path / "half"))
    np.testing.assert_allclose(model(IDS).logits, logits, atol=1e-5)
    assert_given_back(model, half, tmp_path / "again")


def test_of_both_layouts_the_models_own_counts_and_the_other_is_reported(
    case, tmp_path, registered
):
    registered("llama", converters())
    both = {**fused(case), **case.weights}
    folder = written(case, both, tmp_path / "both")
    with pytest.raises(CheckpointError, match=r"unexpected.*wqkv"):
        flaxen.load(folder)
    model = flaxen.load(folder, strict=False)
    np.testing.assert_array_equal(
        model.parameters()["layers.0.mlp.down_proj.weight"],
        case.weights["model.layers.0.mlp.down_proj.weight"],
    )


def test_a_part_that_is_there_twice_is_reported(case, tmp_path, registered):
    registered("llama", converters())
    q = "model.layers.0.self_attn.q_proj.weight"
    folder = written(case, fused(case) | {q: case.weights[q] + 1}, tmp_path / "twice")
    with pytest.raises(CheckpointError, match=r"unexpected.*layers\.0.*wqkv"):
        flaxen.load(folder)


def test_a_conversion_that_fails_is_reported_with_all_else(case, tmp_path, registered):
    registered(
        "llama",
        [WeightConverter(["w1.weight", "w2.weight"], ["q_proj.weight"], [Concatenate(dim=0)])],
    )
    weights = dict(case.weights)
    q = weights.pop("model.layers.0.self_attn.q_proj.weight")
    weights["model.layers.0.self_attn.w1.weight"] = q[:5]
    del weights["model.norm.weight"]
    with pytest.raises(CheckpointError) as error:
        flaxen.load(written(case, weights, tmp_path / "bad"), strict=True)
    assert "conversion" in str(error.value) and "model.norm.weight" in str(error.value)
    with pytest.raises(CheckpointError, match="conversion"):
        flaxen.load(tmp_path / "bad", strict=False)


def test_legacy_norm_names_of_other_models_do_not_touch_these(case, tmp_path, registered):
    registered("llama", [WeightRenaming(r"norm\.gamma", "norm.weight")])
    odd = {k.replace("model.norm.weight", "model.norm.gamma"): v for k, v in case.weights.items()}
    model = flaxen.load(written(case, odd, tmp_path / "odd"))
    assert_given_back(model, odd, tmp_path / "again")


def test_a_prefix_change_is_undone_only_where_it_was_needed(case, tmp_path, registered):
    registered("llama", [PrefixChange(prefix_to_remove="wrapped")])
    odd = {f"wrapped.{k}": v for k, v in case.weights.items()}
    for weights in (odd, case.weights):
        model = flaxen.load(written(case, weights, tmp_path / "in"))
        assert_given_back(model, weights, tmp_path / "out")


def test_sizes_that_differ_are_fresh_where_allowed(case, tmp_path):
    weights = dict(case.weights)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name][:-1]
    folder = written(case, weights, tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"mismatched.*up_proj"):
        flaxen.load(folder)
    model = flaxen.load(folder, ignore_mismatched_sizes=True)
    assert [m.name for m in model.loading.mismatched] == [name]
    assert model.parameters()["layers.1.mlp.up_proj.weight"].shape == case.weights[name].shape
    kept = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(
        model.parameters()[kept.removeprefix("model.")], case.weights[kept]
    )


def test_dtypes_by_name_reach_the_weights_and_the_file(case, tmp_path):
    folder = written(case, case.weights, tmp_path / "in")
    model = flaxen.load(folder, dtype={"norm": "float32", "*": "bfloat16"})
    kinds = {path: str(p.dtype) for path, p in model.parameters().items()}
    assert {k for p, k in kinds.items() if "norm" in p} == {"float32"}
    assert {k for p, k in kinds.items() if "norm" not in p} == {"bfloat16"}
    model.save(tmp_path / "out")
    assert flaxen.load(tmp_path / "out", abstract=True).config.dtype == "bfloat16"


def test_a_dtype_for_names_that_are_not_there_is_refused(case, tmp_path):
    folder = written(case, case.weights, tmp_path / "in")
    with pytest.raises(ConfigError, match="nrm"):
        flaxen.load(folder, dtype={"nrm": "float32"})


@pytest.mark.parametrize("name, options", [("m.gguf", {"quantize": "q8_0"}), ("m.gguf", {})])
def test_a_name_that_ends_in_gguf_becomes_a_file(case, logits, tmp_path, name, options):
    model = flaxen.load(written(case, case.weights, tmp_path / "in"))
    model.save(tmp_path / name, **options)
    assert (tmp_path / name).is_file()
    np.testing.assert_allclose(flaxen.load(tmp_path / name)(IDS).logits, logits, atol=0.1)


def test_a_model_is_saved_in_float8(case, logits, tmp_path):
    model = flaxen.load(written(case, case.weights, tmp_path / "in"))
    model.save(tmp_path / "fp8", quantize="fp8")
    np.testing.assert_allclose(flaxen.load(tmp_path / "fp8")(IDS).logits, logits, atol=0.5)
    with pytest.raises(InputError, match="q8_0"):
        model.save(tmp_path / "x", quantize="q8_0")

"""Adapters of PEFT folders on top of a loaded model."""

from __future__ import annotations

import json

import golden
import numpy as np
import pytest
from hub_server import hub as hub

import flaxen
from flaxen.cli.convert import convert
from flaxen.core.errors import CheckpointError
from flaxen.families import find
from flaxen.tune import add_lora, save_adapter

IDS = np.arange(8).reshape(1, 8)


@pytest.fixture
def folders(tmp_path):
    """A base model, and an adapter of it whose B is not zero."""
    import jax

    base = golden.write_folder(golden.case("llama"), tmp_path / "base")
    grown = add_lora(flaxen.load(base).module, rank=4, alpha=8)
    moved = jax.tree.map(lambda x: x + 0.01, grown)
    names = find("llama").names
    return base, save_adapter(moved, tmp_path / "adapter", names, alpha=8, base=str(base))


def test_an_adapter_changes_what_the_base_says(folders):
    base, adapter = folders
    plain, adapted = flaxen.load(base), flaxen.load(base, adapter=adapter)
    assert np.abs(adapted(IDS).logits - plain(IDS).logits).max() > 1e-3


def test_an_adapter_folder_loads_on_top_of_the_model_it_names(folders):
    base, adapter = folders
    np.testing.assert_array_equal(
        flaxen.load(adapter)(IDS).logits, flaxen.load(base, adapter=adapter)(IDS).logits
    )


def test_a_base_beside_the_adapter_is_found(folders):
    base, adapter = folders
    about = json.loads((adapter / "adapter_config.json").read_text())
    about["base_model_name_or_path"] = "../base"
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    np.testing.assert_array_equal(
        flaxen.load(adapter)(IDS).logits, flaxen.load(base, adapter=adapter)(IDS).logits
    )


def test_an_adapter_of_nothing_says_what_to_do(folders):
    _, adapter = folders
    about = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps(about | {"base_model_name_or_path": None})
    )
    with pytest.raises(CheckpointError, match="adapter="):
        flaxen.load(adapter)


@pytest.mark.parametrize("base", ["elsewhere", "/not/there"])
def test_an_adapter_whose_base_is_gone_says_what_it_is_of(folders, base):
    about = json.loads((folders[1] / "adapter_config.json").read_text())
    about["base_model_name_or_path"] = base
    (folders[1] / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match=f"holds an adapter of '{base}', .* adapter="):
        flaxen.load(folders[1])


def test_an_adapter_goes_onto_a_mesh(folders):
    base, adapter = folders
    on_one = flaxen.load(base, adapter=adapter)(IDS).logits
    on_many = flaxen.load(base, adapter=adapter, mesh="fsdp=4,tp=2")(IDS).logits
    np.testing.assert_allclose(on_many, on_one, atol=1e-5)


def test_an_adapter_on_the_hub_is_found_by_its_id_as_is_its_base(folders, hub):
    base, adapter = folders
    about = json.loads((adapter / "adapter_config.json").read_text())
    about["base_model_name_or_path"] = "org/base"
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    hub.add("org/base", base)
    hub.add("org/adapter", adapter)
    want = flaxen.load(base, adapter=adapter)(IDS).logits
    np.testing.assert_array_equal(flaxen.load("org/adapter")(IDS).logits, want)
    np.testing.assert_array_equal(flaxen.load(base, adapter="org/adapter")(IDS).logits, want)
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        flaxen.load(base, adapter="org/base")


@pytest.mark.parametrize("case", ["llama_layers", "gpt2_dora", "phi3_lora", "phi3_dora"])
def test_conversion_merges_an_adapter_as_the_model_does(case, tmp_path):
    """To the last bits: both work in float32 and round once."""
    name = json.loads((golden.DATA / "adapters" / f"{case}.json").read_text())["base"]
    base = golden.write_folder(golden.case(name), tmp_path / "base")
    adapter = golden.write_adapter(case, tmp_path / "adapter", base)
    convert(str(base), str(tmp_path / "out"), adapter=str(adapter))
    merged = flaxen.load(adapter).merge_adapters()
    written = flaxen.load(tmp_path / "out")
    for path, x in written.parameters().items():
        np.testing.assert_allclose(x, merged.parameters()[path], atol=2e-6, err_msg=path)
    untouched = [k for k in written.parameters() if "layernorm" in k]
    original = flaxen.load(base).parameters()
    for path in untouched:
        np.testing.assert_array_equal(written.parameters()[path], original[path])


def test_conversion_of_an_adapter_is_that_of_its_model(folders, tmp_path):
    base, adapter = folders
    convert(str(adapter), str(tmp_path / "one"), dtype="bfloat16")
    convert(str(base), str(tmp_path / "two"), adapter=str(adapter), dtype="bfloat16")
    files = [(tmp_path / x / "model.safetensors").read_bytes() for x in ("one", "two")]
    assert files[0] == files[1]


def test_conversion_refuses_an_adapter_that_does_not_fit(folders, tmp_path):
    _, adapter = folders
    other = golden.write_folder(golden.case("gpt2"), tmp_path / "gpt2")
    with pytest.raises(CheckpointError, match="the model has no place for"):
        convert(str(other), str(tmp_path / "out"), adapter=str(adapter))
    assert not (tmp_path / "out").exists()

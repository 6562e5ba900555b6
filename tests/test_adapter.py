"""Adapters of PEFT folders on top of a loaded model."""

from __future__ import annotations

import json

import golden
import numpy as np
import pytest

import flaxen
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


def test_an_adapter_goes_onto_a_mesh(folders):
    base, adapter = folders
    on_one = flaxen.load(base, adapter=adapter)(IDS).logits
    on_many = flaxen.load(base, adapter=adapter, mesh="fsdp=4,tp=2")(IDS).logits
    np.testing.assert_allclose(on_many, on_one, atol=1e-5)

"""The golden data themselves."""

from __future__ import annotations

import json

import golden
import numpy as np
import pytest
from safetensors.numpy import load_file


def test_a_weight_is_made_from_its_name():
    made = golden.weight("model.embed_tokens.weight", [3], 0.0, 1.0)
    np.testing.assert_array_equal(
        made, np.float32([0.2736741304397583, 0.3717595338821411, 0.21486669778823853])
    )


@pytest.mark.parametrize("name", golden.cases(None))
def test_arrays_are_as_described(name: str):
    case = golden.case(name)
    for key, (dtype, shape) in case.about["arrays"].items():
        assert case.arrays[key].dtype == dtype
        assert list(case.arrays[key].shape) == shape


def test_legacy_config_is_spelled_the_older_way():
    config = golden.case("llama_rope_linear").legacy_config
    assert "rope_parameters" not in config
    assert config["rope_scaling"]["factor"] == 4.0


@pytest.mark.parametrize("shards", [1, 3])
def test_a_written_folder_holds_every_tensor(tmp_path, shards: int):
    case = golden.case("llama")
    golden.write_folder(case, tmp_path, shards=shards)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == shards
    tensors = {key: array for file in files for key, array in load_file(file).items()}
    assert tensors.keys() == case.weights.keys()
    assert all(np.array_equal(tensors[key], case.weights[key]) for key in tensors)
    if shards > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files}

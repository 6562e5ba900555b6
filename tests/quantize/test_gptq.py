"""Rounded weights written as a GPTQ folder."""

from __future__ import annotations

import json

import golden
import numpy as np
import pytest
import quantized_files as files

import flaxen
from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.formats.safetensors import open_safetensors
from flaxen.core.errors import CheckpointError
from flaxen.core.tree import paths
from flaxen.quantize import QuantizedWeight, RoundedWeight, Rounding, gptq_tensors
from flaxen.quantize.rounded import rounded_weight
from flaxen.quantize.rounded_tensors import rounded_parts


@pytest.mark.parametrize("rounding", [Rounding(4, 32), Rounding(8), Rounding(4, -1)], ids=str)
def test_words_hold_numbers_as_the_format_says(rounding):
    w = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    fitted = rounding.fitted(16, 64)
    parts = rounded_parts(ArrayTensor(w), fitted)
    leaf = rounded_weight(parts, fitted, (16, 64), 1, np.dtype(np.float32), whole=False)
    tensors, config = gptq_tensors({"a": leaf}, lambda t: {"a.weight": t["a"]})
    found = {name: tensor.read() for name, tensor in tensors.items()}
    stored = {role: part.read() for role, part in parts.items()}
    half, group = 2 ** (fitted.bits - 1), fitted.group
    codes = fitted.codes(stored["codes"]).astype(int) + half
    stream = lambda rows: np.stack([files._stream(row, fitted.bits) for row in rows])
    np.testing.assert_array_equal(found["a.qweight"], stream(codes).T)
    zeros = np.full((64 // group, 16), half - 1)
    np.testing.assert_array_equal(found["a.qzeros"], stream(zeros))
    np.testing.assert_array_equal(found["a.scales"], stored["scales"].T)
    np.testing.assert_array_equal(found["a.g_idx"], np.arange(64) // group)
    assert config["bits"] == fitted.bits
    assert config["group_size"] == (-1 if group == 64 else group)


@pytest.mark.parametrize(
    ("name", "bits", "scan"),
    [("llama", 4, True), ("phi3", 8, False), ("mixtral", 4, False), ("falcon", 8, False)],
)
def test_a_folder_holds_the_same_values_bit_for_bit(tmp_path, name, bits, scan):
    golden.write_folder(golden.case(name), tmp_path / "a")
    model = flaxen.load(tmp_path / "a", bits=bits, scan_layers=scan)
    model.save(tmp_path / "b", quantize="gptq")
    again = flaxen.load(tmp_path / "b", scan_layers=scan)
    found = again.parameters()
    is_leaf = lambda x: isinstance(x, RoundedWeight)
    for path, leaf in paths(model.module, is_leaf).items():
        values = leaf.values() if is_leaf(leaf) else leaf
        if is_leaf(leaf) and leaf.stacked and len(leaf.inner) > 2:
            values = values.reshape(found[path].shape)
        np.testing.assert_array_equal(found[path], values, err_msg=path)
    packed = [n for n in open_safetensors(tmp_path / "b" / "model.safetensors") if "qweight" in n]
    assert packed
    about = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert about["quant_method"] == "gptq"


def test_it_stays_packed_in_memory_when_it_is_loaded_so(tmp_path):
    golden.write_folder(golden.case("llama"), tmp_path / "a")
    model = flaxen.load(tmp_path / "a", bits=4)
    model.save(tmp_path / "b", quantize="gptq")
    kept = flaxen.load(tmp_path / "b", quantized="keep")
    is_leaf = lambda x: isinstance(x, QuantizedWeight)
    assert sum(map(is_leaf, paths(kept.module, is_leaf).values())) == 14
    ids = golden.case("llama").arrays["full_input_ids"]
    found, expected = (np.asarray(m(ids).logits) for m in (kept, model))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_sharded_model_writes_the_same_folder(tmp_path):
    golden.write_folder(golden.case("llama"), tmp_path / "a")
    for name, mesh in (("b", None), ("c", "tp=2,fsdp=4")):
        flaxen.load(tmp_path / "a", bits=4, mesh=mesh).save(tmp_path / name, quantize="gptq")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "bc")
    assert one == other


@pytest.mark.parametrize(
    ("name", "bits", "said"),
    [
        ("llama", None, "No weight is rounded"),
        ("llama", {"mlp": 4, "self_attn": 8}, "are of 2 kinds"),
        ("gpt2", 8, "outputs by inputs alone"),
        ("phi3", {"q_proj": 8}, "one tensor of the file, but rounded in part"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(tmp_path, name, bits, said):
    golden.write_folder(golden.case(name), tmp_path / "a")
    model = flaxen.load(tmp_path / "a", bits=bits)
    with pytest.raises(CheckpointError, match=said):
        model.save(tmp_path / "b", quantize="gptq")
    assert not (tmp_path / "b").exists()

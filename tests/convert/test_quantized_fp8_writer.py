"""Matrices written as float8 with a scale for each block."""

from __future__ import annotations

import functools

import golden
import ml_dtypes
import numpy as np
import pytest

import flaxen
from flaxen.convert.arrays import ArrayTensor
from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.formats.safetensors import open_safetensors
from flaxen.convert.lazy import concrete
from flaxen.convert.save import write_checkpoint
from flaxen.core.errors import CheckpointError
from flaxen.quantize import fp8, quantize_fp8

BLOCK = (16, 8)


def matrix(shape=(48, 40), seed=0):
    """Magnitudes over many powers of two, and a block of zeros."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * np.exp2(rng.integers(-12, 4, shape))
    values[:16, :8] = 0
    return values.astype(np.float32)


def quantised(array, block=BLOCK):
    return quantize_fp8({"a.weight": ArrayTensor(array)}, {}, block=block)[0]


def written(folder, tensors, config, **options):
    tensors, config = quantize_fp8(
        {n: ArrayTensor(a) for n, a in tensors.items()}, config, **options
    )
    write_checkpoint(tensors, folder, config=config)
    return folder


def step(scaled):
    """The distance between neighbours of E4M3 at a magnitude: three bits, never below 2 ** -9."""
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(scaled))), -6)
    return np.exp2(exponent - 3)


def test_values_are_off_by_half_a_step_at_most(tmp_path):
    values = matrix()
    folder = written(tmp_path, {"a.weight": values}, {"dtype": "float32"}, block=BLOCK)
    back = open_checkpoint(folder)["a.weight"].read().astype(np.float64)
    scales = open_safetensors(folder)["a.weight_scale_inv"].read().astype(np.float64)
    wide = np.kron(scales, np.ones(BLOCK))
    allowed = step(values / wide) * wide / 2
    assert (np.abs(values - back) <= allowed * (1 + 1e-6)).all()
    assert (np.abs(values - back) > allowed * 0.9).any()


def test_a_blocks_scale_is_its_largest_magnitude_over_448():
    values = matrix((24, 16))[16:]
    tensors = quantised(values, (4, 8))
    scales = tensors["a.weight_scale_inv"].read()
    assert scales.dtype == np.float32 and scales.shape == (2, 2)
    for i, j in np.ndindex(2, 2):
        block = np.abs(values[i * 4 : i * 4 + 4, j * 8 : j * 8 + 8])
        assert scales[i, j] == np.float32(block.max()) / np.float32(448)


def test_a_block_of_zeros_has_the_scale_1():
    tensors = quantised(matrix())
    assert tensors["a.weight_scale_inv"].read()[0, 0] == 1
    assert (tensors["a.weight"].read()[:16, :8].astype(np.float32) == 0).all()


def test_any_box_has_the_values_of_the_whole(monkeypatch):
    monkeypatch.setattr(fp8, "CHUNK", 3 * 16 * 8 * 4)
    for name, tensor in quantised(matrix()).items():
        whole, rng = tensor.read(), np.random.default_rng(1)
        for _ in range(20):
            ends = [sorted(rng.integers(0, n + 1, 2).tolist()) for n in whole.shape]
            box = concrete([slice(*pair) for pair in ends], whole.shape)
            np.testing.assert_array_equal(tensor.read(box), whole[box], err_msg=name)


def test_a_box_reads_only_its_own_blocks():
    source = ArrayTensor(matrix())
    tensors, _ = quantize_fp8({"a.weight": source}, {}, block=BLOCK)
    tensors["a.weight"].read((slice(17, 20), slice(7, 9)))
    assert source.counter.total == 16 * 16 * 4


def test_heads_tables_norms_and_odd_sizes_stay(tmp_path):
    names = {
        "lm_head.weight": (32, 32),
        "model.embed_tokens.weight": (32, 32),
        "model.layers.0.mlp.gate.weight": (32, 32),
        "model.layers.0.mlp.gate_proj.weight": (32, 32),
        "model.layers.0.mlp.odd_proj.weight": (20, 32),
        "model.layers.0.mlp.small_proj.weight": (12, 8),
        "model.norm.weight": (32,),
    }
    arrays = {name: np.ones(shape, ml_dtypes.bfloat16) for name, shape in names.items()}
    folder = written(tmp_path, arrays, {"dtype": "bfloat16"}, block=BLOCK)
    found = open_safetensors(folder)
    eights = {name for name, t in found.items() if t.dtype == ml_dtypes.float8_e4m3fn}
    assert eights == {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "small")}
    about = found.config["quantization_config"]
    assert about == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, 8],
        "modules_to_not_convert": [
            "lm_head",
            "model.embed_tokens",
            "model.layers.0.mlp.gate",
            "model.layers.0.mlp.odd_proj",
        ],
    }


def test_a_quantised_checkpoint_is_not_quantised_again():
    with pytest.raises(CheckpointError, match="already"):
        quantize_fp8({}, {"quantization_config": {"quant_method": "awq"}})


@functools.cache
def llama():
    case = golden.case("llama")
    return {name: array.astype(ml_dtypes.bfloat16) for name, array in case.weights.items()}


def test_a_model_written_in_float8_loads_near_the_original(tmp_path):
    folder = written(tmp_path, llama(), golden.case("llama").config | {"dtype": "bfloat16"})
    model = flaxen.load(folder, dtype="float32")
    for path, array in model.parameters().items():
        if path.endswith("_proj.weight"):
            name = f"model.{path}"
            original = llama()[name].astype(np.float32).reshape(array.shape)
            assert np.abs(np.asarray(array) - original).max() <= np.abs(original).max() / 16 / 1.75


@pytest.mark.parametrize("width, side", [(256, 128), (192, 64), (160, 32)])
def test_blocks_are_the_largest_that_matrices_divide_into(width, side):
    matrix = ArrayTensor(np.ones((width, width), np.float32))
    tensors, config = quantize_fp8({"a.weight": matrix}, {})
    assert config["quantization_config"]["weight_block_size"] == [side, side]
    assert tensors["a.weight_scale_inv"].shape == (width // side, width // side)


def test_a_model_without_a_matrix_of_blocks_is_refused():
    with pytest.raises(CheckpointError, match="No matrix divides"):
        quantize_fp8({"a.weight": ArrayTensor(np.ones((131, 131), np.float32))}, {})

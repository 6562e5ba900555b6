"""Quantised checkpoints under plain names, against the published formulas and Transformers.

data/quantized/transformers.npz: what `convert_moe_packed_tensors` (MXFP4) and
`Fp8Dequantize` of Transformers 5.24 on torch 2.13 make of random codes.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import quantized_files as files

from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.lazy import concat, concrete, stack
from flaxen.convert.schemes import base
from flaxen.core.errors import CheckpointError

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = {"quant_method": "fp8", "weight_block_size": [4, 8]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False}
ORDER = np.random.default_rng(3).permutation(np.arange(32) // 8)


def rng():
    return np.random.default_rng(0)


def named(stored, module="a"):
    return {f"{module}.{role}": array for role, array in stored.parts.items()}


def opened(folder, tensors, settings, **config):
    files.write(folder, tensors, {"quantization_config": settings, **config})
    return open_checkpoint(folder)


def with_scales(stored, scales, values):
    return files.Stored(stored.parts | {"weight_scale_inv": scales}, values)


def per_tensor(shape):
    stored = files.fp8(rng(), 6, 8, (6, 8))
    scales = stored.parts["weight_scale_inv"].reshape(shape)
    return with_scales(stored, scales, stored.values)


def experts():
    two = [files.fp8(np.random.default_rng(i), 4, 16, (4, 8)) for i in range(2)]
    parts = {role: np.stack([s.parts[role] for s in two]) for role in two[0].parts}
    return files.Stored(parts, np.stack([s.values for s in two]))


def exponents(dtype):
    stored = files.fp8(rng(), 8, 16, (4, 8))
    powers = np.random.default_rng(1).integers(110, 130, (2, 2), np.uint8)
    factors = np.ldexp(1.0, powers.astype(int) - 127) / stored.parts["weight_scale_inv"]
    values = stored.values * np.kron(factors, np.ones((4, 8)))
    return with_scales(stored, powers.view(dtype), values)


CASES = {
    "fp8 blocks": (files.fp8(rng(), 8, 16, (4, 8)), FP8),
    "fp8 partial blocks at the edges": (files.fp8(rng(), 10, 20, (4, 8)), FP8),
    "fp8 per tensor": (per_tensor((1,)), {"quant_method": "fp8"}),
    "fp8 with a scalar scale": (per_tensor(()), {"quant_method": "fp8"}),
    "fp8 experts in one tensor": (experts(), FP8),
    "fp8 blocks of another size than said": (files.fp8(rng(), 6, 20, (3, 5)), FP8),
    "fp8 exponents": (exponents(ml_dtypes.float8_e8m0fnu), FP8 | {"scale_fmt": "ue8m0"}),
    "fp8 exponents in bytes": (exponents(np.uint8), FP8 | {"scale_fmt": "ue8m0"}),
    "awq": (files.awq(rng(), 16, 24, 8), AWQ),
    "awq, one group": (files.awq(rng(), 16, 24, 24), AWQ | {"group_size": -1}),
    "awq, older keys": (
        files.awq(rng(), 16, 24, 8),
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 8, "version": "GEMM"},
    ),
    "gptq": (files.gptq(rng(), 16, 32, 8), GPTQ),
    "gptq, one group": (files.gptq(rng(), 16, 32, 32), GPTQ | {"group_size": -1}),
    "gptq in order of activations": (files.gptq(rng(), 16, 32, 8, order=ORDER), GPTQ),
    "gptq v2": (files.gptq(rng(), 16, 32, 8, less=0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq, a last group cut short": (files.gptq(rng(), 8, 40, 16), GPTQ | {"group_size": 16}),
    "gptq 2 bits": (files.gptq(rng(), 16, 32, 8, bits=2), GPTQ | {"bits": 2}),
    "gptq 3 bits": (files.gptq(rng(), 32, 64, 16, bits=3), GPTQ | {"bits": 3, "group_size": 16}),
    "gptq 8 bits": (files.gptq(rng(), 16, 32, 8, bits=8), GPTQ | {"bits": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_published_formula(tmp_path, case):
    stored, settings = CASES[case]
    checkpoint = opened(tmp_path, named(stored), settings, dtype="float32")
    assert list(checkpoint) == ["a.weight"] and "quantization_config" not in checkpoint.config
    assert checkpoint.quantization == settings
    # One product of a few bits each: float32 holds the ints' exactly, and rounds float8's once.
    np.testing.assert_array_equal(checkpoint["a.weight"].read(), stored.values.astype(np.float32))


@pytest.mark.parametrize("case", [*CASES, "mxfp4"])
def test_any_box_has_its_values(tmp_path, case, monkeypatch):
    monkeypatch.setattr(base, "CHUNK", 200)
    if case == "mxfp4":
        stored = files.mxfp4(rng(), 2, 96, 5)
        parts = {f"a_{role}": array for role, array in stored.parts.items()}
        tensor = opened(tmp_path, parts, {"quant_method": "mxfp4"}, dtype="float32")["a"]
    else:
        stored, settings = CASES[case]
        tensor = opened(tmp_path, named(stored), settings, dtype="float32")["a.weight"]
    values, draw = stored.values.astype(np.float32), np.random.default_rng(2)
    np.testing.assert_array_equal(tensor.read(), values)
    for _ in range(12):
        ends = [sorted(draw.integers(0, n + 1, 2).tolist()) for n in values.shape]
        box = concrete([slice(*pair) for pair in ends], values.shape)
        np.testing.assert_array_equal(tensor.read(box), values[box])


def vectors():
    path = Path(__file__).parent.parent / "data" / "quantized" / "transformers.npz"
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


def test_mxfp4_experts_are_those_of_transformers_bit_for_bit(tmp_path):
    data = vectors()
    tensors = {f"mlp.experts.gate_up_proj_{k}": data[f"mxfp4_{k}"] for k in ("blocks", "scales")}
    bias = np.ones((2, 5), BF16)
    checkpoint = opened(
        tmp_path, tensors | {"mlp.experts.gate_up_proj_bias": bias}, {"quant_method": "mxfp4"}
    )
    assert sorted(checkpoint) == ["mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"]
    found = checkpoint["mlp.experts.gate_up_proj"].read()
    assert found.dtype == BF16
    np.testing.assert_array_equal(found.view(np.uint16), data["mxfp4_bfloat16"])


@pytest.mark.parametrize("scales", ["scales", "exponents"])
def test_fp8_blocks_are_those_of_transformers_bit_for_bit(tmp_path, scales):
    data = vectors()
    weight = data["fp8_codes"].view(ml_dtypes.float8_e4m3fn)
    tensors = {"a.weight": weight, "a.weight_scale_inv": data[f"fp8_{scales}"]}
    tensor = opened(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [2, 4]})
    kind = "" if scales == "scales" else "exponents_"
    found = tensor["a.weight"].read().view(np.uint16)
    np.testing.assert_array_equal(found, data[f"fp8_{kind}bfloat16"])


def test_another_dtype_is_not_rounded_through_the_configs(tmp_path):
    data = vectors()
    weight = data["fp8_codes"].view(ml_dtypes.float8_e4m3fn)
    tensors = {"a.weight": weight, "a.weight_scale_inv": data["fp8_scales"]}
    settings = {"quant_method": "fp8", "weight_block_size": [2, 4]}
    tensor = opened(tmp_path, tensors, settings, dtype="bfloat16")["a.weight"]
    exact = data["fp8_float32"]
    assert tensor.dtype == BF16
    np.testing.assert_array_equal(tensor.astype(np.float32).read(), exact)
    for view, expected in {
        tensor.reshape((2, 3, 8)).permute((1, 0, 2)): exact.reshape(2, 3, 8).transpose(1, 0, 2),
        tensor.crop((slice(1, 4), slice(2, 7))): exact[1:4, 2:7],
        stack([tensor, tensor]): np.stack([exact, exact]),
        concat([tensor, tensor], 1): np.concatenate([exact, exact], 1),
    }.items():
        np.testing.assert_array_equal(view.astype(np.float32).read(), expected)


def test_the_dtype_is_the_configs_else_that_of_16_bit_scales(tmp_path):
    tensors = named(CASES["awq"][0])
    assert opened(tmp_path, tensors, AWQ)["a.weight"].dtype == np.float16
    assert opened(tmp_path, tensors, AWQ, torch_dtype="bfloat16")["a.weight"].dtype == BF16
    nested = {"text_config": {"dtype": "float32"}}
    assert opened(tmp_path, tensors, AWQ, **nested)["a.weight"].dtype == np.float32


def test_tensors_that_are_not_quantised_pass_unchanged(tmp_path):
    plain = {
        "lm_head.weight": np.arange(6, dtype=np.float32).reshape(2, 3).astype(BF16),
        "a.bias": np.ones(16, np.float16),
        "router.weight": np.ones((2, 2), ml_dtypes.float8_e4m3fn),
    }
    settings = FP8 | {"modules_to_not_convert": ["lm_head", "router"]}
    checkpoint = opened(tmp_path, plain | named(CASES["fp8 blocks"][0]), settings)
    for name, array in plain.items():
        found = checkpoint[name].read()
        assert found.dtype == array.dtype and found.tobytes() == array.tobytes()


def test_a_box_reads_only_its_own_blocks(tmp_path):
    checkpoint = opened(tmp_path, named(files.fp8(rng(), 64, 64, (16, 16))), FP8 | BLOCK16)
    checkpoint["a.weight"].read((slice(16, 24), slice(20, 40)))
    assert checkpoint.bytes_read == 8 * 20 + 2 * 4


def test_a_box_of_integers_reads_only_its_own_groups(tmp_path):
    checkpoint = opened(tmp_path, named(files.awq(rng(), 32, 64, 8)), AWQ)
    checkpoint["a.weight"].read((slice(9, 10), slice(8, 20)))
    assert checkpoint.bytes_read == 12 * 4 + 2 * 4 + 2 * 8 * 2


BLOCK16 = {"weight_block_size": [16, 16]}


def changed(stored, **arrays):
    tensors = named(stored) | {f"a.{role}": array for role, array in arrays.items()}
    return {name: array for name, array in tensors.items() if array is not None}


FP8_STORED, AWQ_STORED, GPTQ_STORED = (CASES[c][0] for c in ("fp8 blocks", "awq", "gptq"))
MX = {f"a_{role}": array for role, array in files.mxfp4(rng(), 2, 32, 4).parts.items()}
MXFP4 = {"quant_method": "mxfp4"}
DAMAGED = {
    "unknown method": ({}, {"quant_method": "bitsandbytes"}, "'bitsandbytes'.*fp8, mxfp4, awq"),
    "no method": ({}, {"bits": 4}, "quantised with None"),
    "a list": ({}, [4], "quantised with \\[4\\]"),
    "a name alone": (named(AWQ_STORED), "awq", "quantised with 'awq'"),
    "no settings": (named(AWQ_STORED), None, "'a.qweight' is quantised, but .* quant_config.json"),
    "fp8, plain modules that are none": (
        named(FP8_STORED),
        FP8 | {"modules_to_not_convert": 5},
        "modules_to_not_convert=5",
    ),
    "awq, plain modules in one word": (
        named(AWQ_STORED),
        AWQ | {"modules_to_not_convert": "lm_head"},
        "expected a list of names",
    ),
    "awq, and the plain weight": (
        changed(AWQ_STORED, weight=np.ones((16, 24), np.float32)),
        AWQ,
        "'a.weight' is there as it is and quantised too",
    ),
    "fp8, no scales": (changed(FP8_STORED, weight_scale_inv=None), FP8, "a.weight_scale_inv' is"),
    "fp8, a wrong grid": (
        changed(FP8_STORED, weight_scale_inv=np.ones((3, 2), np.float32)),
        FP8,
        r"shape \[8, 16\] and scales of shape \[3, 2\]",
    ),
    "fp8, scales of integers": (
        changed(FP8_STORED, weight_scale_inv=np.ones((2, 2), np.int32)),
        FP8,
        "is int32",
    ),
    "fp8, a weight in float32": (
        changed(FP8_STORED, weight=np.ones((8, 16), np.float32)),
        FP8,
        "'a.weight' is float32",
    ),
    "fp8, half a block size": (named(FP8_STORED), FP8 | {"weight_block_size": [4]}, "block_size"),
    "fp8, a block of 0": (named(FP8_STORED), FP8 | {"weight_block_size": [0, 4]}, "above 0"),
    "mxfp4, no scales": ({"a_blocks": MX["a_blocks"]}, MXFP4, "'a_scales' is not"),
    "mxfp4, half blocks": (MX | {"a_blocks": MX["a_blocks"][..., :8]}, MXFP4, "any, 16"),
    "mxfp4, other scales": (MX | {"a_scales": MX["a_scales"][:, :2]}, MXFP4, r"expected uint8\["),
    "awq, no zeros": (changed(AWQ_STORED, qzeros=None), AWQ, "'a.qzeros' is not"),
    "awq, other groups": (named(AWQ_STORED), AWQ | {"group_size": 4}, r"expected int32\[6, 2\]"),
    "awq, another kernel": (named(AWQ_STORED), AWQ | {"version": "gemv"}, "'gemv'"),
    "awq, 8 bits": (named(AWQ_STORED), AWQ | {"bits": 8}, "bits=8"),
    "awq, group of 0": (named(AWQ_STORED), AWQ | {"group_size": 0}, "group_size=0"),
    "awq, group is a word": (named(AWQ_STORED), AWQ | {"group_size": "x"}, "group_size='x'"),
    "awq, three axes": (
        changed(AWQ_STORED, qweight=np.ones((2, 2, 2), np.int32)),
        AWQ,
        r"expected int32\[any, any\]",
    ),
    "gptq, no bits": (named(GPTQ_STORED), {"quant_method": "gptq", "group_size": 8}, "bits=None"),
    "gptq, other format": (named(GPTQ_STORED), GPTQ | {"checkpoint_format": "marlin"}, "'marlin'"),
    "gptq, another width": (named(GPTQ_STORED), GPTQ | {"bits": 8}, "expected int32"),
    "gptq, words cut": (named(GPTQ_STORED), GPTQ | {"bits": 3}, "fill no whole words"),
    "gptq, short index": (changed(GPTQ_STORED, g_idx=np.zeros(3, np.int32)), GPTQ, "'a.g_idx'"),
    "gptq, groups that are none": (
        changed(GPTQ_STORED, g_idx=np.full(32, 4, np.int32)),
        GPTQ,
        "groups from 4 to 4; the weight has 4",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_what_does_not_fit_is_refused_when_opened(tmp_path, case):
    tensors, settings, message = DAMAGED[case]
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, tensors or {"x": np.ones(2)}, settings)

"""Packed weights under adapters, in training, and beside experts."""

from __future__ import annotations

import json

import golden
import ml_dtypes
import numpy as np
import pytest
import quantized_files as files
from words import word_tokenizer

import flaxen
from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.core.errors import ConfigError
from flaxen.core.tree import paths
from flaxen.layers.runtime import Runtime
from flaxen.quantize import QuantizedWeight
from flaxen.train import TrainConfig, train
from flaxen.train.step import make_trainer
from flaxen.tune import adapters, add_lora

BF16 = ml_dtypes.bfloat16
BLOCK = (24, 16)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def written(folder, name):
    """A golden model whose projections, also those of experts, are in fp8."""
    case, tensors = golden.case(name), {}
    for i, (key, array) in enumerate(case.weights.items()):
        if array.ndim == 2 and ("_proj" in key or ".experts." in key):
            made = files.fp8(np.random.default_rng(i), *array.shape, BLOCK)
            tensors |= {key.removesuffix("weight") + r: part for r, part in made.parts.items()}
        else:
            tensors[key] = array.astype(BF16)
    config = case.config | {"dtype": "bfloat16", "quantization_config": FP8}
    return files.write(folder, tensors, config)


def packed(tree):
    found = paths(tree, lambda x: isinstance(x, QuantizedWeight))
    return {path: x for path, x in found.items() if isinstance(x, QuantizedWeight)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return written(tmp_path_factory.mktemp("fp8"), "llama")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "a.jsonl"
    line = json.dumps({"text": " ".join(f"w{10 + i % 5}" for i in range(12))})
    path.write_text(f"{line}\n" * 16)
    return path


@pytest.mark.parametrize(
    "name", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("scan", [False, True])
def test_experts_do_not_stay_packed(tmp_path, name, scan):
    folder = written(tmp_path / "a", name)
    kept = flaxen.load(folder, quantized="keep", scan_layers=scan)
    plain = flaxen.load(folder, scan_layers=scan)
    assert packed(kept.module)
    assert not [path for path in packed(kept.module) if "experts" in path]
    ids = golden.case(name).arrays["full_input_ids"]
    found, expected = (np.asarray(m(ids).logits, np.float32) for m in (kept, plain))
    np.testing.assert_allclose(found, expected, atol=0.05)
    kept.save(tmp_path / "b")
    before, after = open_checkpoint(folder), open_checkpoint(tmp_path / "b")
    assert set(after) == set(before)
    for key, tensor in before.items():
        assert after[key].read().tobytes() == tensor.read().tobytes(), key


def test_packed_weights_are_not_trained_themselves(llama):
    kept = flaxen.load(llama, quantized="keep")
    with pytest.raises(ConfigError, match="cannot be trained. Train adapters"):
        make_trainer(kept.module, Runtime(), TrainConfig(output="unused"), 1)


def test_a_compute_dtype_leaves_codes_and_scales_as_they_are(llama):
    tree = add_lora(flaxen.load(llama, quantized="keep").module, rank=2)
    trainer, _ = make_trainer(
        tree, Runtime(), TrainConfig(output="unused", lora_rank=2, dtype="bfloat16"), 1
    )
    for leaf in packed(trainer.frozen).values():
        assert leaf.parts["weight"].dtype == files.FP8
        assert leaf.parts["weight_scale_inv"].dtype == np.float32


@pytest.mark.parametrize(
    ("scan", "mesh"),
    [pytest.param(False, None, marks=pytest.mark.exhaustive), (True, "fsdp=2,tp=2")],
)
def test_adapters_train_on_packed_weights_as_on_plain_ones(tmp_path, llama, data, scan, mesh):
    results = []
    for way in ("keep", "dequantize"):
        model = flaxen.load(llama, quantized=way, scan_layers=scan, mesh=mesh)
        settings = TrainConfig(
            output=tmp_path / way,
            steps=3,
            seq_len=16,
            batch_size=4,
            learning_rate=1e-2,
            lora_rank=2,
            lora_targets=("q_proj", "up_proj"),
            progress=False,
        )
        results.append(train(model, word_tokenizer(90), data, settings))
    kept, plain = results
    np.testing.assert_allclose(kept.losses, plain.losses, atol=1e-3)
    merged, expected = (open_checkpoint(r.model_path) for r in results)
    assert set(merged) == set(expected)
    for key, tensor in expected.items():
        found, wanted = merged[key].read(), tensor.read()
        np.testing.assert_allclose(found.astype(float), wanted.astype(float), atol=0.02)


def test_adapters_are_cut_like_their_packed_weight(llama):
    cut = [
        adapters(add_lora(flaxen.load(llama, quantized=way, mesh="fsdp=2,tp=2").module, rank=4))
        for way in ("keep", "dequantize")
    ]
    for path, leaf in cut[1].items():
        for side in ("a", "b"):
            found, wanted = (getattr(x, side).sharding for x in (cut[0][path], leaf))
            assert found.is_equivalent_to(wanted, getattr(leaf, side).ndim), path

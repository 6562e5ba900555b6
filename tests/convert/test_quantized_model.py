"""Models whose projections are quantised: loaded as plain weights, or kept packed."""

from __future__ import annotations

import dataclasses
import functools
import json

import golden
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quantized_files as files

import flaxen
from flaxen.convert.formats.checkpoint import open_checkpoint
from flaxen.convert.formats.safetensors import open_safetensors
from flaxen.core.dot import WeightLeaf, dot
from flaxen.core.errors import CheckpointError, ConfigError
from flaxen.core.tree import paths
from flaxen.quantize import QuantizedWeight, keep, packed_leaf

BF16 = ml_dtypes.bfloat16
ORDER = np.random.default_rng(3).permutation(np.arange(64) // 16)
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [24, 16],
    "modules_to_not_convert": ["lm_head"],
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}
METHODS = {"fp8": FP8, "awq": AWQ, "gptq": GPTQ}


def is_leaf(x):
    return isinstance(x, QuantizedWeight)


@functools.cache
def weights(method):
    """The golden llama with quantised projections: as stored, and as plain values."""
    stored, plain = {}, {}
    for i, (name, array) in enumerate(golden.case("llama").weights.items()):
        if not name.endswith("_proj.weight"):
            stored[name] = plain[name] = array.astype(BF16)
            continue
        made = matrix(method, np.random.default_rng(i), *array.shape)
        stored |= {name.removesuffix("weight") + role: part for role, part in made.parts.items()}
        plain[name] = made.values.astype(np.float32)
    return stored, plain


def matrix(method, rng, out, ins):
    if method == "fp8":
        return files.fp8(rng, out, ins, (24, 16))
    if method == "awq":
        return files.awq(rng, out, ins, 16)
    # The inputs of the golden model's matrices: 64, or the size of its feed-forward part.
    order = np.resize(ORDER, ins) if ins == 64 else None
    return files.gptq(rng, out, ins, 16, order=order)


def config():
    return golden.case("llama").config | {"dtype": "bfloat16"}


@pytest.fixture(params=METHODS, scope="module")
def method(request):
    return request.param


@pytest.fixture(scope="module")
def quantised(tmp_path_factory, method):
    return written(tmp_path_factory.mktemp(method), method)


def written(folder, method):
    settings = {"quantization_config": METHODS[method]}
    return files.write(folder, weights(method)[0], config() | settings)


def logits(model):
    return np.asarray(jax.jit(lambda m, ids: m(ids).logits)(model, ids()))


def ids():
    return golden.case("llama").arrays["full_input_ids"]


def test_logits_are_those_of_the_plain_model_of_the_same_values(tmp_path, quantised, method):
    plain = files.write(tmp_path, weights(method)[1], config())
    expected = logits(flaxen.load(plain, dtype="float32"))
    model = flaxen.load(quantised, dtype="float32")
    np.testing.assert_array_equal(logits(model), expected)
    kept = flaxen.load(quantised, dtype="float32", quantized="keep")
    np.testing.assert_allclose(logits(kept), expected, atol=1e-5, rtol=0)
    assert len([x for x in jax.tree.leaves(kept, is_leaf=is_leaf) if is_leaf(x)]) == 14


def test_kept_weights_round_to_the_models_dtype_as_plain_ones_do(quantised):
    plain, kept = flaxen.load(quantised), flaxen.load(quantised, quantized="keep")
    found = paths(unpacked(kept.module))
    for path, array in paths(plain.module).items():
        assert found[path].dtype == array.dtype == BF16
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(array))


@jax.jit
def unpacked(module):
    return jax.tree.map(lambda x: x.values() if is_leaf(x) else x, module, is_leaf=is_leaf)


def test_kept_weights_take_the_memory_of_their_codes(quantised, method):
    kept = flaxen.load(quantised, quantized="keep")
    stored = sum(array.nbytes for array in weights(method)[0].values())
    assert sum(x.nbytes for x in jax.tree.leaves(kept.module)) == stored


def test_a_product_in_pieces_is_the_whole_one(quantised, monkeypatch):
    whole = flaxen.load(quantised, dtype="float32", quantized="keep")
    monkeypatch.setattr(keep, "PIECE", 8 << 10)
    cut = flaxen.load(quantised, dtype="float32", quantized="keep")
    # The last block of scales is cut short in some of the fp8 matrices: those stay whole.
    assert max(x.pieces for x in jax.tree.leaves(cut, is_leaf=is_leaf) if is_leaf(x)) >= 2
    np.testing.assert_allclose(logits(cut), logits(whole), atol=1e-5, rtol=0)


def test_blocks_that_end_within_a_piece_are_not_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(keep, "PIECE", 128)
    for rows, pieces in ((9, 1), (12, 3)):
        # Three rows of scales in both; only in the second are all blocks full.
        stored = files.fp8(np.random.default_rng(0), rows, 8, (4, 8))
        settings = {"quantization_config": FP8 | {"weight_block_size": [4, 8]}}
        tensors = {f"a.{role}": part for role, part in stored.parts.items()}
        folder = files.write(tmp_path / str(rows), tensors, settings)
        leaf = packed_leaf(open_checkpoint(folder)["a.weight"].astype(np.float32))
        assert leaf.pieces == pieces
        read = {role: part.read() for role, part in leaf.parts.items()}
        leaf = jax.tree.map(jnp.asarray, dataclasses.replace(leaf, parts=read))
        found = leaf.dot(jnp.eye(8), 1)
        np.testing.assert_allclose(np.asarray(found), stored.values.T, rtol=1e-6)


def test_layers_fold_with_their_packed_weights(quantised):
    kept = flaxen.load(quantised, dtype="float32", quantized="keep", scan_layers=True)
    [leaf] = {
        id(x): x
        for path, x in paths(kept.module, is_leaf).items()
        if path.endswith("up_proj.weight")
    }.values()
    assert is_leaf(leaf) and leaf.shape == (2, *leaf.inner)
    unfolded = flaxen.load(quantised, dtype="float32", quantized="keep")
    np.testing.assert_allclose(logits(kept), logits(unfolded), atol=1e-5, rtol=0)


def test_on_a_mesh_the_parts_are_cut_as_the_weight_is(quantised, method):
    whole = logits(flaxen.load(quantised, dtype="float32", quantized="keep"))
    kept = flaxen.load(quantised, dtype="float32", quantized="keep", mesh="fsdp=2,tp=2")
    np.testing.assert_allclose(logits(kept), whole, atol=2e-5, rtol=0)
    up = paths(kept.module, is_leaf)["layers.0.mlp.up_proj.weight"].parts
    codes = up["weight"] if method == "fp8" else up["qweight"]
    assert codes.addressable_shards[0].data.size == codes.size // 4


def test_what_does_not_divide_is_whole_on_every_device(quantised, method):
    kept = flaxen.load(quantised, quantized="keep", mesh="tp=8", plan="tp")
    key = paths(kept.module, is_leaf)["layers.0.self_attn.k_proj.weight"].parts
    if method == "fp8":
        assert key["weight_scale_inv"].sharding.is_fully_replicated
    assert np.isfinite(logits(kept).astype(np.float32)).all()


@pytest.mark.parametrize(("scan", "mesh"), [(False, None), (True, "fsdp=2,tp=2")])
def test_saving_gives_the_stored_tensors_back(tmp_path, quantised, method, scan, mesh):
    kept = flaxen.load(quantised, quantized="keep", scan_layers=scan, mesh=mesh)
    kept.save(tmp_path / "again")
    before, after = open_safetensors(quantised), open_safetensors(tmp_path / "again")
    assert set(after) == set(before)
    for name, tensor in before.items():
        found = after[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert found.read().tobytes() == tensor.read().tobytes(), name
    assert after.config["quantization_config"] == METHODS[method]


def test_weights_replaced_by_plain_ones_are_said_to_be_plain(tmp_path):
    folder = written(tmp_path / "a", "fp8")
    kept = flaxen.load(folder, quantized="keep")
    module = jax.tree.map(
        lambda x: x.values() if is_leaf(x) and x.outs == 1 else x, kept.module, is_leaf=is_leaf
    )
    kept.replace(module=module).save(tmp_path / "b")
    about = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.up_proj" in about["modules_to_not_convert"]
    assert "model.layers.1.self_attn.q_proj" not in about["modules_to_not_convert"]
    again = flaxen.load(tmp_path / "b", dtype="float32")
    np.testing.assert_allclose(
        logits(again), logits(flaxen.load(folder, dtype="float32")), atol=0.05
    )


def test_a_plain_load_saves_a_plain_checkpoint(tmp_path):
    quantised = written(tmp_path / "a", "awq")
    flaxen.load(quantised).save(tmp_path / "plain again")
    checkpoint = open_safetensors(tmp_path / "plain again")
    assert "quantization_config" not in checkpoint.config
    assert {t.dtype for t in checkpoint.values()} == {np.dtype(BF16)}


def test_packed_weights_are_not_converted_when_saved(tmp_path):
    quantised = written(tmp_path / "a", "awq")
    kept = flaxen.load(quantised, quantized="keep")
    with pytest.raises(CheckpointError, match="leave dtype out"):
        kept.save(tmp_path / "other", dtype="float32")
    assert not (tmp_path / "other").exists()


def test_an_unknown_way_is_refused(tmp_path):
    quantised = written(tmp_path / "a", "awq")
    with pytest.raises(ConfigError, match="'keep'"):
        flaxen.load(quantised, quantized="yes")


def test_a_leaf_is_what_a_product_takes(tmp_path):
    quantised = written(tmp_path / "a", "awq")
    kept = flaxen.load(quantised, dtype="float32", quantized="keep")
    leaf = paths(kept.module, is_leaf)["layers.0.mlp.up_proj.weight"]
    assert isinstance(leaf, WeightLeaf)
    values, rows = jax.jit(lambda leaf: (leaf.values(), leaf.rows(jnp.array([[1, 0]]))))(leaf)
    np.testing.assert_array_equal(np.asarray(rows), np.asarray(values)[[[1, 0]]])


def test_gradients_through_a_packed_weight_are_those_through_its_values(tmp_path):
    kept = flaxen.load(written(tmp_path / "a", "awq"), dtype="float32", quantized="keep")
    leaf = paths(kept.module, is_leaf)["layers.0.mlp.up_proj.weight"]
    x = np.random.default_rng(0).normal(size=(2, 3, 64)).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda x, weight: (dot(x, weight) ** 2).sum()))
    found, expected = gradient(x, leaf), gradient(x, unpacked(leaf))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5)

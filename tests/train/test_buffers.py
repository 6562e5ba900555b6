"""Corrections of routers stay as they are: no 16-bit dtype rounds them and no step moves them."""

from __future__ import annotations

import re

import golden
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import flaxen
from flaxen.core.tree import buffers, is_param, paths
from flaxen.pretrained import from_config
from flaxen.train import TrainConfig
from flaxen.train.state import State
from flaxen.train.step import make_trainer, place_batch, trainable, trained_tree

GATE, ALL = r"layers\.\d+\.mlp\.gate\.weight", r"layers\.\d+\.mlp\.gate\..*"
WIDE = {
    "bfloat16": {
        "deepseek_v2": GATE,
        "deepseek_v3": ALL,
        "glm4_moe": ALL,
        "ernie4_5_moe": ALL,
        "hunyuan_v1_moe": GATE,
        "lfm2_moe": r"layers\.\d+\.mlp\.gate\.expert_bias",
        "gpt_oss": r"(?!)",
        "qwen3_moe": r"(?!)",
    },
    "float16": {"gpt_oss": r".*norm\.weight", "deepseek_v3": ALL},
}
"""What Transformers keeps in float32 whichever dtype is asked for, by our paths."""

CORRECTED = ["deepseek_v3", "glm4_moe", "ernie4_5_moe", "lfm2_moe"]
CASES = [(dtype, name) for dtype, names in WIDE.items() for name in names]


def loaded(name, folder, **options):
    return flaxen.load(golden.write_folder(golden.case(name), folder), progress=False, **options)


@pytest.mark.parametrize(("dtype", "name"), CASES)
def test_what_no_16_bit_dtype_is_for_stays_float32(tmp_path, dtype, name):
    how = {"dtype": dtype, "scan_layers": False, "abstract": True}
    model = loaded(name, tmp_path, **how)
    wide = {path for path, x in model.parameters().items() if x.dtype == jnp.float32}
    assert wide == {path for path in model.parameters() if re.fullmatch(WIDE[dtype][name], path)}
    fresh = from_config(golden.about(name)["config"], **how)
    assert {path for path, x in fresh.parameters().items() if x.dtype == jnp.float32} == wide


def test_a_rule_about_them_is_followed(tmp_path):
    plan = {"correction_bias": "bfloat16", "*": "bfloat16"}
    model = loaded("deepseek_v3", tmp_path, dtype=plan, scan_layers=False, abstract=True)
    assert [model.parameters()[p].dtype for p in buffers(model.module)] == [jnp.bfloat16]


@pytest.mark.parametrize(
    ("name", "stored"),
    [*((name, np.float32) for name in CORRECTED), ("deepseek_v3", ml_dtypes.bfloat16)],
)
def test_a_correction_is_given_back_as_it_was_stored(tmp_path, name, stored):
    folder = golden.write_folder(golden.case(name), tmp_path / "a")
    tensors = load_file(folder / "model.safetensors")
    keys = [key for key in tensors if re.search("e_score_correction_bias|expert_bias", key)]
    tensors |= {key: tensors[key].astype(stored) for key in keys}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    flaxen.load(folder, dtype="bfloat16", progress=False).save(tmp_path / "b", progress=False)
    flaxen.load(folder, progress=False).save(tmp_path / "c", dtype="bfloat16", progress=False)
    for saved in ("b", "c"):
        given = load_file(tmp_path / saved / "model.safetensors")
        assert keys
        for key in keys:
            assert given[key].dtype == stored
            assert given[key].tobytes() == tensors[key].tobytes()


@pytest.mark.parametrize("name", CORRECTED)
def test_a_correction_is_not_trained(tmp_path, name):
    module = loaded(name, tmp_path, abstract=True).module
    params = paths(module, is_param)
    trained = {path for path, x in params.items() if trainable(module)(path, x)}
    assert params.keys() - trained == set(buffers(module)) != set()


def test_no_step_moves_or_rounds_a_correction(tmp_path):
    model = loaded("glm4_moe", tmp_path, scan_layers=True)
    config = TrainConfig(
        output="unused", optimizer="sgd", learning_rate=1.0, weight_decay=0.5, dtype="bfloat16"
    )
    trainer, state = make_trainer(model.module, model.runtime, config, 1)
    ids = np.arange(8, dtype=np.int32).reshape(1, 1, 8)
    batch = place_batch({"ids": ids, "targets": ids}, model.runtime)
    held, frozen = set(buffers(model.module)), paths(trainer.frozen.weights)
    assert {frozen[path].dtype for path in held} == {np.dtype(np.float32)}
    state, _ = trainer.step(state, trainer.frozen, batch)
    assert unmoved(model.module, trained_tree(state, model.module)) == held


def unmoved(before, after):
    old = paths(before)
    same = lambda x, y: (np.asarray(x) == np.asarray(y)).all()
    return {path for path, x in paths(after).items() if same(x, old[path])}


def test_no_optimiser_of_ones_own_moves_a_correction(tmp_path):
    module = loaded("deepseek_v3", tmp_path).module
    state = State.create(params=module, tx=optax.add_decayed_weights(0.5))
    moved = state.apply_gradients(jax.tree.map(jnp.ones_like, module))
    assert unmoved(module, moved.params) == set(buffers(module))


def test_a_state_of_several_dtypes_is_restored(tmp_path):
    model = loaded("deepseek_v3", tmp_path / "a", dtype="bfloat16")
    config = model.origin.config_json
    State.create(params=model.module, config_json=config).save_state(tmp_path / "b")
    again = State.restored(tmp_path / "b")
    kinds = lambda tree: {path: x.dtype for path, x in paths(tree).items()}
    assert kinds(again.params) == kinds(model.module)

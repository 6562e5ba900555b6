"""Adapter folders as the PEFT library wrote them compute here what they compute there."""

from __future__ import annotations

import json

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import flaxen
from flaxen.core.tree import combine, partition, paths
from flaxen.tune import adapters, trainable_paths

CASES = sorted(path.stem for path in (golden.DATA / "adapters").glob("*.json"))


def base_of(name: str) -> str:
    return json.loads((golden.DATA / "adapters" / f"{name}.json").read_text())["base"]


def ids_and_expected(name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    with np.load(golden.DATA / "adapters" / f"{name}.npz") as file:
        expected = {key: file[key] for key in file.files}
    return golden.case(base_of(name)).arrays["full_input_ids"], expected


@pytest.fixture
def adapted(request, tmp_path):
    """The model with the case's adapter, from files."""
    name, options = request.param
    base = golden.write_folder(golden.case(base_of(name)), tmp_path / "base")
    folder = golden.write_adapter(name, tmp_path / "adapter", base)
    return flaxen.load(folder, **options)


every_case = pytest.mark.parametrize(
    ("name", "adapted"), [(name, (name, {})) for name in CASES], indirect=["adapted"], ids=CASES
)


@every_case
def test_logits_are_pefts_before_and_after_merging(name, adapted):
    ids, expected = ids_and_expected(name)
    np.testing.assert_allclose(adapted(ids).logits, expected["logits"], atol=5e-5)
    merged = adapted.merge_adapters()
    assert not adapters(merged.module)
    np.testing.assert_allclose(merged(ids).logits, adapted(ids).logits, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "adapted"),
    [
        (name, (name, {"scan_layers": True}))
        for name in ("llama_layers", "llama_patterns", "phi3_dora")
    ],
    indirect=["adapted"],
)
def test_stacked_layers_compute_and_save_the_same(name, adapted, tmp_path):
    ids, expected = ids_and_expected(name)
    np.testing.assert_allclose(adapted(ids).logits, expected["logits"], atol=5e-5)
    np.testing.assert_allclose(adapted.merge_adapters()(ids).logits, expected["logits"], atol=5e-5)
    about = json.loads((golden.DATA / "adapters" / f"{name}.json").read_text())
    saved = load_file(adapted.save_adapter(tmp_path / "again") / "adapter_model.safetensors")
    assert {k: list(x.shape) for k, x in saved.items()} == {k: s for k, s, *_ in about["tensors"]}


@every_case
def test_a_saved_folder_has_pefts_tensors(name, adapted, tmp_path):
    """Loaded and saved, an adapter has every tensor that it had, under the same name."""
    folder = adapted.save_adapter(tmp_path / "again")
    before = golden.adapter_tensors(
        json.loads((golden.DATA / "adapters" / f"{name}.json").read_text())["tensors"]
    )
    after = load_file(folder / "adapter_model.safetensors")
    assert after.keys() == before.keys()
    for key, x in before.items():
        np.testing.assert_allclose(after[key], x, rtol=1e-6, atol=1e-7, err_msg=key)


@pytest.mark.parametrize(
    ("name", "adapted"),
    [(name, (name, {})) for name in ("llama_dora", "gpt2_dora")],
    indirect=["adapted"],
)
def test_gradients_of_dora_are_pefts(name, adapted):
    """Lengths are constants to the gradient; q, k and v add up to the one A that they share."""
    ids, expected = ids_and_expected(name)
    wanted = trainable_paths(adapted.module)
    trained, frozen = partition(adapted.module, lambda path, _: path in wanted)

    @jax.grad
    def gradient(trained):
        model = adapted.replace(module=combine(trained, frozen))
        return jnp.mean(jnp.square(model(ids).logits))

    grads = gradient(trained)
    found = {path: np.asarray(g) for path, g in paths(grads).items() if ".1." in path}
    total = dict.fromkeys(("lora_A", "lora_B", "lora_magnitude"), 0.0)
    for path, g in found.items():
        key = {"a": "lora_A", "b": "lora_B", "magnitude": "lora_magnitude"}[path.split(".")[-1]]
        total[key] += float(np.square(g, dtype=np.float64).sum())
    theirs = dict.fromkeys(total, 0.0)
    for key, g in expected.items():
        side = next((side for side in theirs if side in key), None)
        if side:
            theirs[side] += float(np.square(g, dtype=np.float64).sum())
    assert total["lora_B"] == pytest.approx(theirs["lora_B"], rel=1e-4)
    assert total["lora_magnitude"] == pytest.approx(theirs["lora_magnitude"], rel=1e-4)
    fused = found.get("layers.1.self_attn.q_proj.weight.a")
    if fused is not None and any("c_attn" in k or "qkv" in k for k in expected):
        a = sum(found[f"layers.1.self_attn.{x}_proj.weight.a"] for x in "qkv")
        key = next(k for k in expected if ("c_attn" in k or "qkv" in k) and "lora_A" in k)
        np.testing.assert_allclose(a.reshape(len(a), -1), expected[key], rtol=1e-3, atol=1e-6)
    else:
        assert total["lora_A"] == pytest.approx(theirs["lora_A"], rel=1e-4)

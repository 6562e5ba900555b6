"""The same numbers on eight devices, however they are arranged."""

from __future__ import annotations

import golden
import numpy as np
import pytest
from safetensors.numpy import load_file

import flaxen

MESHES = ["dp=8", "fsdp=8", "tp=2,fsdp=4", "sp=2,tp=2,fsdp=2"]


ONCE = {
    "mixtral": "ep=2,tp=2,fsdp=2",
    "qwen2_moe": "dp=2,ep=4",
    "qwen3_moe": None,
    "gpt2": "tp=2,fsdp=4",
    "phi3": "sp=2,tp=2,fsdp=2",
    "olmo": None,
    "olmo3": None,
    "arcee": None,
    "seed_oss": None,
    "ministral": None,
    "helium": None,
    "exaone4": None,
    "apertus": "tp=2,fsdp=4",
    "glm4_moe": None,
    "ernie4_5_moe": "ep=2,tp=2,fsdp=2",
    "granitemoeshared": None,
    "hunyuan_v1_dense": "tp=2,fsdp=4",
    "hunyuan_v1_moe": None,
    "olmo2": "tp=2,fsdp=4",
    "olmoe": "ep=2,tp=2,fsdp=2",
    "smollm3": None,
    "glm": "sp=2,tp=2,fsdp=2",
    "glm4": None,
    "ernie4_5": None,
    "granite": "tp=2,fsdp=4",
    "granitemoe": "ep=2,tp=2,fsdp=2",
    "phimoe": "dp=2,ep=4",
    "gpt_oss": "ep=2,tp=2,fsdp=2",
    "llama4_text": "ep=2,tp=2,fsdp=2",
    "deepseek_v2": "ep=2,tp=2,fsdp=2",
    "deepseek_v3": "sp=2,ep=2,tp=2",
}
"""These differ in how experts run or weights are stored: one mesh that cuts just that, or none if
another has the same parts.
"""


@pytest.mark.parametrize(
    ("name", "mesh"),
    [(n, m) for n in golden.cases() for m in ([ONCE[n]] if n in ONCE else MESHES) if m],
)
def test_logits_loss_and_gradients(name, mesh, tmp_path):
    case = golden.case(name)
    x = case.arrays
    model = flaxen.load(golden.write_folder(case, tmp_path), mesh=mesh)
    logits, loss, grads = golden.logits_loss_and_gradients(case, model)
    assert np.abs(logits - x["logits_pos"])[x["attention_mask"] == 1].max() < 5e-5
    assert abs(loss - x["loss"]) < 1e-5
    grads.save(tmp_path / "grads")
    hub = load_file(tmp_path / "grads" / "model.safetensors")
    for key, norm in case.grad_norms.items():
        assert np.linalg.norm(hub[key]) == pytest.approx(norm, rel=1e-3), key


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_greedy_tokens_and_bytes(name, mesh, tmp_path):
    case = golden.case(name)
    x = case.arrays
    model = flaxen.load(golden.write_folder(case, tmp_path), mesh=mesh)
    got = model.generate(
        x["gen_input_ids"], x["gen_attention_mask"], max_new_tokens=16, eos_token_id=[]
    )
    np.testing.assert_array_equal(got, x["gen_sequences"])
    model.save(tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {k: v.tobytes() for k, v in back.items()} == {
        k: v.tobytes() for k, v in case.weights.items()
    }


@pytest.mark.parametrize("mesh", MESHES)
def test_batch_one_and_odd_lengths(mesh, tmp_path):
    case = golden.case("llama")
    folder = golden.write_folder(case, tmp_path)
    ids = case.arrays["long_input_ids"][:, :7]
    want = flaxen.load(folder)(ids).logits
    np.testing.assert_allclose(flaxen.load(folder, mesh=mesh)(ids).logits, want, atol=2e-5)


def test_more_tensor_parallel_devices_than_key_heads(tmp_path):
    case = golden.case("llama")
    model = flaxen.load(golden.write_folder(case, tmp_path), mesh="tp=8")
    assert "kv_heads=2 does not divide by tp=8" in model.loading.replicated
    logits = model(case.arrays["full_input_ids"]).logits
    assert np.abs(np.asarray(logits) - case.arrays["full_logits"]).max() < 5e-5

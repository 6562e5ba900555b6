"""The same numbers on eight devices, however they are arranged."""

from __future__ import annotations

import golden
import numpy as np
import pytest
from safetensors.numpy import load_file

import flaxen

MESHES = ["dp=8", "fsdp=8", "tp=2,fsdp=4", "sp=2,tp=2,fsdp=2"]
EXPERTS = "ep=2,tp=2,fsdp=2"

SEVERAL = {"llama": MESHES, "gemma3_text": MESHES, "mixtral": [EXPERTS, "dp=2,ep=2,tp=2"]}
"""All arrangements; every other case runs on one."""

OTHERS = {
    "qwen2_moe": "dp=2,ep=4",
    "phimoe": "dp=2,ep=4",
    "olmoe": EXPERTS,
    "granitemoe": EXPERTS,
    "gpt_oss": EXPERTS,
    "llama4_text": EXPERTS,
    "deepseek_v2": EXPERTS,
    "deepseek_v3": "sp=2,ep=2,tp=2",
    "phi3": "sp=2,tp=2,fsdp=2",
    "glm": "sp=2,tp=2,fsdp=2",
    "mpt": "sp=2,tp=2,fsdp=2",
}
"""Experts have an axis of their own; some have their sequence cut."""

SAME = {
    "llama_rope_dynamic": "llama_rope_linear",
    "llama_rope_llama3": "llama_rope_linear",
    "llama_rope_yarn": "llama_rope_linear",
    "mistral": "starcoder2",
    "qwen3": "olmo2",
    "qwen3_moe": "qwen2_moe",
    "olmo": "llama",
    "smollm3": "llama",
    "ernie4_5": "llama",
    "glm4": "glm",
    "gemma": "gemma3_text",
    "gemma2": "gemma3_text",
    "cohere": "cohere2",
    "gpt_neo": "gpt2",
    "persimmon": "gpt_neox",
    "falcon_rw_style": "falcon",
}
"""These are cut as another case is."""


def runs() -> list[tuple[str, str]]:
    """Every case and where it runs."""
    names = [name for name in golden.cases() if name not in SAME]
    return [(n, m) for n in names for m in SEVERAL.get(n, [OTHERS.get(n, "tp=2,fsdp=4")])]


@pytest.mark.parametrize(("name", "mesh"), runs())
def test_logits_loss_and_gradients(name, mesh, tmp_path):
    case = golden.case(name)
    x = case.arrays
    model = flaxen.load(golden.write_folder(case, tmp_path), mesh=mesh)
    logits, loss, grads = golden.logits_loss_and_gradients(case, model)
    assert np.abs(logits - case.logits_pos)[x["attention_mask"] == 1].max() < case.bound
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

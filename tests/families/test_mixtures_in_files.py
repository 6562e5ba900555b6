"""Mixtures whose files hold all experts in one tensor, as plain numbers or packed."""

from __future__ import annotations

import json

import golden
import numpy as np
import pytest
import quantized_files
from safetensors.numpy import save_file

import flaxen


@pytest.fixture(scope="module")
def packed():
    """The golden GPT-OSS with experts in MXFP4: what a file holds, and the plain numbers."""
    case = golden.case("gpt_oss")
    stored, plain = dict(case.weights), dict(case.weights)
    for name in [n for n in case.weights if n.endswith(("gate_up_proj", "experts.down_proj"))]:
        experts, ins, outs = case.weights[name].shape
        rng = np.random.default_rng(len(name))
        made = quantized_files.mxfp4(rng, experts, ins, outs)
        parts = {"scales": made.parts["scales"] - 5, "blocks": made.parts["blocks"]}
        plain[name] = (made.values * 2.0**-5).astype(np.float32)
        del stored[name]
        stored |= {f"{name}_{role}": part for role, part in parts.items()}
    return case, stored, plain


def write(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def test_experts_in_mxfp4_are_those_numbers(packed, tmp_path):
    case, stored, plain = packed
    about = {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "float32"}
    ids = case.arrays["full_input_ids"]
    got = flaxen.load(write(tmp_path / "packed", case.config | about, stored))
    want = flaxen.load(write(tmp_path / "plain", case.config, plain))
    np.testing.assert_array_equal(
        got.module.layers[0].mlp.experts.gate_proj.weight,
        plain["model.layers.0.mlp.experts.gate_up_proj"][..., ::2].swapaxes(1, 2),
    )
    np.testing.assert_allclose(got(ids).logits, want(ids).logits, atol=1e-5)


PLACES = {
    "gpt_oss": lambda w: w[..., ::2].swapaxes(1, 2),
    "llama4_text": lambda w: w[..., : w.shape[-1] // 2].swapaxes(1, 2),
}


@pytest.mark.parametrize("name", PLACES)
def test_gate_lies_where_the_family_says(name, tmp_path):
    """Swapped halves would survive a round trip."""
    case = golden.case(name)
    model = flaxen.load(golden.write_folder(case, tmp_path))
    key = next(k for k in case.weights if k.endswith("experts.gate_up_proj"))
    layer = model.module.layers[int(key.split(".")[2])]
    np.testing.assert_array_equal(
        layer.mlp.experts.gate_proj.weight, PLACES[name](case.weights[key])
    )


PACKED = {"deepseek_v3": 1, "olmoe": 0}


@pytest.mark.parametrize("name", PACKED)
def test_files_that_pack_what_others_keep_apart(name, tmp_path):
    """Transformers 5 may write all experts of a layer into one tensor."""
    case = golden.case(name)
    tensors, layers = dict(case.weights), range(PACKED[name], 2)
    for i in layers:
        base = f"model.layers.{i}.mlp.experts"
        count = sum(k.startswith(base) for k in case.weights) // 3
        take = lambda e, part: tensors.pop(f"{base}.{e}.{part}_proj.weight")  # noqa: B023
        pairs = [np.concatenate([take(e, "gate"), take(e, "up")]) for e in range(count)]
        downs = [take(e, "down") for e in range(count)]
        tensors[f"{base}.gate_up_proj"] = np.stack(pairs)
        tensors[f"{base}.down_proj"] = np.stack(downs)
    model = flaxen.load(write(tmp_path / "packed", case.config, tensors))
    out = model(case.arrays["full_input_ids"]).logits
    np.testing.assert_allclose(out, case.arrays["full_logits"], atol=5e-5)

"""Every head of every encoder, and unusual configs, against Transformers on torch."""

from __future__ import annotations

import encoder_cases
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import flaxen

LIKE = ("single", "tokens", "span", "choices")


def masked(x, mask):
    """What is compared of an array that has a value for each token."""
    if x.shape[:2] != mask.shape:
        return x
    return x * mask.reshape(*mask.shape, *[1] * (x.ndim - 2))


def all_heads():
    """Of bert and modernbert; the heads of other families are alike."""
    for name in encoder_cases.names():
        family, kind = name.split("/")
        like = family not in ("bert", "modernbert") and kind in LIKE
        yield pytest.param(name, marks=[pytest.mark.exhaustive] if like else [])


@pytest.mark.parametrize("name", list(all_heads()))
def test_outputs_gradients_and_bytes(name, tmp_path):
    case = encoder_cases.case(name)
    model = flaxen.load(encoder_cases.write(tmp_path, case.config, case.weights))

    @jax.jit
    def run(model):
        def loss(model):
            out = model(**case.given)
            return out.loss, out

        return jax.value_and_grad(loss, has_aux=True)(model)

    (_, out), grads = run(model) if case.norms else ((None, model(**case.given)), None)
    assert case.want
    for key, want in case.want.items():
        got = masked(np.asarray(getattr(out, key)), case.given["attention_mask"])
        assert got.shape == want.shape, key
        assert np.abs(got - want).max() < (1e-5 if key == "loss" else 5e-5), key
    if "loss" in case.want:
        inputs = {key: x for key, x in case.given.items() if key != "input_ids"}
        alone = model.loss(case.given["input_ids"], **inputs)
        assert abs(alone - case.want["loss"]) < 1e-5
    if grads is not None:
        grads.save(tmp_path / "grads")
        hub = load_file(tmp_path / "grads" / "model.safetensors")
        got = {key: np.linalg.norm(hub[key]) for key in case.norms}
        assert got == pytest.approx(case.norms, rel=1e-3, abs=1e-5)
    model.save(tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {k: v.tobytes() for k, v in back.items()} == {
        k: v.tobytes() for k, v in case.weights.items()
    }


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("mpnet/bare", {"mesh": "fsdp=4,tp=2"}),
        ("modernbert/mean", {"mesh": "fsdp=4,tp=2"}),
        ("modernbert/bare", {"mesh": "sp=2,tp=2,fsdp=2", "scan_layers": True}),
        ("bert/choices", {"mesh": "dp=8"}),
        ("mpnet/bare", {"scan_layers": True}),
    ],
)
def test_meshes_and_folded_layers_change_nothing(name, how, tmp_path):
    case = encoder_cases.case(name)
    model = flaxen.load(encoder_cases.write(tmp_path, case.config, case.weights), **how)
    out = model(**case.given)
    for key, want in case.want.items():
        got = masked(np.asarray(getattr(out, key)), case.given["attention_mask"])
        assert np.abs(got - want).max() < 5e-5, key

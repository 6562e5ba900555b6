"""Encoders against Transformers on torch: logits, loss, gradients, bytes, configs, meshes."""

from __future__ import annotations

import golden
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import flaxen

CASES = golden.cases("encoder")
MESHES = ["fsdp=4,tp=2", "sp=2,tp=2,fsdp=2"]
LOGITS, LOSS, GRADIENTS = 5e-5, 1e-5, 1e-3
"""Bounds of tests/data/golden/README.md: absolute, absolute, relative."""


def close(got, want, mask=None, atol=LOGITS):
    error = np.abs(np.asarray(got) - want)
    assert (error if mask is None else error[mask == 1]).max() < atol


WAYS = [(n, how) for n in CASES for how in (None, "scan", *MESHES)]


@pytest.fixture(
    scope="module",
    params=[
        # Both have the same parts.
        pytest.param(way, marks=[pytest.mark.exhaustive] if way[0] == "roberta" and way[1] else [])
        for way in WAYS
    ],
)
def loaded(request, tmp_path_factory):
    name, how = request.param
    folder = golden.write_folder(golden.case(name), tmp_path_factory.mktemp(name))
    mesh = how if how in MESHES else None
    return golden.case(name), flaxen.load(folder, mesh=mesh, scan_layers=how == "scan")


def test_numbers_gradients_and_bytes(loaded, tmp_path):
    case, model = loaded
    x, mask = case.arrays, case.arrays["attention_mask"]

    @jax.jit
    def run(model):
        def loss(model):
            out = model(x["input_ids"], mask, labels=x["labels"], output_hidden_states=True)
            return out.loss, out

        return jax.value_and_grad(loss, has_aux=True)(model)

    (loss, out), grads = run(model)
    close(out.logits, x["logits"], mask)
    close(out.hidden_states[1], x["hidden_1"], mask)
    assert abs(loss - x["loss"]) < LOSS
    close(model(x["long_input_ids"]).logits, x["long_logits"])
    if "logits_token_type" in x:
        got = model(x["input_ids"], mask, token_type_ids=x["token_type_ids"]).logits
        close(got, x["logits_token_type"], mask)
    grads.save(tmp_path / "grads")
    hub = load_file(tmp_path / "grads" / "model.safetensors")
    for name, norm in case.grad_norms.items():
        assert np.linalg.norm(hub[name]) == pytest.approx(norm, rel=GRADIENTS), name
    model.save(tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == case.weights.keys()
    for name, want in case.weights.items():
        assert (back[name].dtype, back[name].shape) == (want.dtype, want.shape)
        assert back[name].tobytes() == want.tobytes()


@pytest.mark.parametrize("name", CASES)
def test_a_sparse_config_means_the_same(name, tmp_path):
    case = golden.case(name)
    model = flaxen.load(golden.write_folder(case, tmp_path, sparse=True))
    close(model(case.arrays["long_input_ids"]).logits, case.arrays["long_logits"])

"""Every head of every encoder, and unusual configs, against Transformers on torch."""

from __future__ import annotations

import json

import golden
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import flaxen

FOLDER = golden.DATA / "encoders"
CASES = {
    f"{path.stem}-{name}": (path, name)
    for path in sorted(FOLDER.glob("*.json"))
    for name in json.loads(path.read_text())
}


def read(case, folder):
    """A case as a folder, what goes in, what comes out, and the norms of gradients."""
    path, name = CASES[case]
    about = json.loads(path.read_text())[name]
    weights = {
        key: golden.weight(key, shape, base, scale, dtype)
        for key, shape, dtype, base, scale in about["tensors"]
    }
    (folder / "config.json").write_text(json.dumps(about["config"]))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with np.load(path.with_suffix(".npz")) as file:
        arrays = {
            key.removeprefix(f"{name}/"): file[key] for key in file if key.startswith(f"{name}/")
        }
    part = lambda of: {k.removeprefix(of): v for k, v in arrays.items() if k.startswith(of)}
    return weights, part("in/"), part("out/"), about["grad_norms"]


@pytest.mark.parametrize("case", CASES)
def test_outputs_gradients_and_bytes(case, tmp_path):
    weights, given, want, norms = read(case, tmp_path)
    model = flaxen.load(tmp_path)

    @jax.jit
    def run(model):
        def loss(model):
            out = model(**given)
            return out.loss, out

        return jax.value_and_grad(loss, has_aux=True)(model)

    (_, out), grads = run(model) if norms else ((None, model(**given)), None)
    assert want
    mask = given["attention_mask"]
    for key, value in want.items():
        got = np.asarray(getattr(out, key))
        if got.shape[:2] == mask.shape:
            got = got * mask.reshape(*mask.shape, *[1] * (got.ndim - 2))
        assert got.shape == value.shape, key
        assert np.abs(got - value).max() < (1e-5 if key == "loss" else 5e-5), key
    if grads is not None:
        grads.save(tmp_path / "grads")
        hub = load_file(tmp_path / "grads" / "model.safetensors")
        got = {key: np.linalg.norm(hub[key]) for key in norms}
        assert got == pytest.approx(norms, rel=1e-3, abs=1e-5)
    model.save(tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {k: v.tobytes() for k, v in back.items()} == {k: v.tobytes() for k, v in weights.items()}

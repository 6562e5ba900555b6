"""Every family against Transformers on torch: logits, loss, gradients, greedy tokens, bytes."""

from __future__ import annotations

import golden
import numpy as np
import pytest
from safetensors.numpy import load_file

import flaxen

CASES = golden.cases()
FOLDED = ["llama", "gemma3_text", "qwen2", "llama_rope_dynamic", "mixtral"]
"""With `scan_layers`: every kind of layer; other rope tables differ before the layers only."""
LOGITS, LOSS, GRADIENTS = 5e-5, 1e-5, 1e-3
"""Bounds of tests/data/golden/README.md: absolute, absolute, relative."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: golden.write_folder(golden.case(name), tmp_path_factory.mktemp(name))
        for name in CASES
    }


@pytest.fixture(
    scope="module",
    params=[(name, scan) for scan in (False, True) for name in CASES if not scan or name in FOLDED],
    ids=lambda param: param[0] + ("-scan" if param[1] else "-list"),
)
def loaded(request, folders):
    name, scan = request.param
    return golden.case(name), flaxen.load(folders[name], scan_layers=scan)


def close(got, want, mask=None, atol=LOGITS):
    error = np.abs(np.asarray(got) - want)
    assert (error if mask is None else error[mask == 1]).max() < atol


def short(case, model):
    """Padded rows and full ones, as one batch: one program."""
    x = case.arrays
    ids = np.concatenate([x["input_ids"], x["full_input_ids"]])
    mask = np.concatenate([x["attention_mask"], np.ones_like(x["full_input_ids"])])
    out = model(ids, mask, output_hidden_states=True)
    rows = len(x["input_ids"])
    return out.logits[:rows], out.logits[rows:], out.hidden_states[1][rows:]


def test_logits_and_residual_stream_of_padded_and_full_rows(loaded):
    case, model = loaded
    x = case.arrays
    padded, full, stream = short(case, model)
    close(padded, x["logits"], x["attention_mask"])
    close(full, x["full_logits"])
    close(stream, x["full_hidden_1"])


def test_logits_past_every_window_and_rope_switch(loaded):
    case, model = loaded
    close(model(case.arrays["long_input_ids"]).logits, case.arrays["long_logits"])


def test_logits_loss_and_gradient_norms_at_given_positions(loaded, tmp_path):
    case, model = loaded
    x = case.arrays
    logits, loss, grads = golden.logits_loss_and_gradients(case, model)
    close(logits, x["logits_pos"], x["attention_mask"])
    assert abs(loss - x["loss"]) < LOSS
    grads.save(tmp_path)
    hub = load_file(tmp_path / "model.safetensors")
    for name, norm in case.grad_norms.items():
        assert np.linalg.norm(hub[name]) == pytest.approx(norm, rel=GRADIENTS), name


def test_cached_greedy_tokens_with_folded_layers(folders):
    """Those of plain layers are in tests/generate."""
    x = golden.case("gemma3_text").arrays
    model = flaxen.load(folders["gemma3_text"], scan_layers=True)
    got = model.generate(
        x["gen_input_ids"], x["gen_attention_mask"], max_new_tokens=16, eos_token_id=[]
    )
    np.testing.assert_array_equal(got, x["gen_sequences"])


def test_saving_gives_back_every_byte(loaded, tmp_path):
    case, model = loaded
    model.save(tmp_path)
    back = load_file(tmp_path / "model.safetensors")
    assert back.keys() == case.weights.keys()
    for name, want in case.weights.items():
        assert back[name].dtype == want.dtype
        assert back[name].shape == want.shape
        assert back[name].tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("name", "how"),
    [(n, "sparse") for n in CASES]
    + [(n, "legacy") for n in CASES if golden.about(n)["config_legacy"]],
)
def test_older_and_sparse_configs_mean_the_same(name, how, tmp_path):
    case = golden.case(name)
    model = flaxen.load(golden.write_folder(case, tmp_path, **{how: True}))
    # The arguments of another test: equal programs are compiled once.
    close(short(case, model)[1], case.arrays["full_logits"])

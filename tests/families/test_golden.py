"""Every family against Transformers on torch: logits, loss, gradients, greedy tokens, bytes."""

from __future__ import annotations

import golden
import numpy as np
import pytest
from safetensors.numpy import load_file

import flaxen

CASES = golden.cases()
FOLDED = ["llama", "gemma3_text", "qwen2", "llama_rope_dynamic", "mixtral", "qwen3_next"]
FOLDED += ["gpt_neox", "opt_350m_style", "bloom", "granitemoe"]
"""With `scan_layers`: every kind of layer; other rope tables differ before the layers only."""
LOSS, GRADIENTS = 1e-5, 1e-3
"""Bounds of tests/data/golden/README.md: absolute, relative."""


def label(name, scan):
    return name + ("-scan" if scan else "-list")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: golden.write_folder(golden.case(name), tmp_path_factory.mktemp(name))
        for name in CASES
    }


@pytest.fixture(
    scope="module",
    params=[(name, scan) for scan in (False, True) for name in CASES if not scan or name in FOLDED],
    ids=lambda param: label(*param),
)
def loaded(request, folders):
    name, scan = request.param
    return golden.case(name), flaxen.load(folders[name], scan_layers=scan)


def close(case, got, want, mask=None):
    error = np.abs(np.asarray(got) - want)
    assert (error if mask is None else error[mask == 1]).max() < case.bound


def follows_length(case):
    """Whether the frequencies of a rope depend on how long a call is."""
    rope = str(case.config.get("rope_parameters"))
    return "'dynamic'" in rope or "'longrope'" in rope


def outputs(case, model):
    """Logits and residual stream of padded, full and long rows, as one batch: one program.

    Where frequencies follow the length of a call, long rows are a call of their own.
    """
    x = case.arrays
    ids = np.concatenate([x["input_ids"], x["full_input_ids"]])
    mask = np.concatenate([x["attention_mask"], np.ones_like(x["full_input_ids"])])
    rows, (count, width), long = len(x["input_ids"]), ids.shape, x["long_input_ids"]
    far = None
    if follows_length(case):
        far = model(long).logits
    else:
        beyond = [(0, 0), (0, long.shape[1] - width)]
        ids = np.concatenate([np.pad(ids, beyond), long])
        mask = np.concatenate([np.pad(mask, beyond), np.ones_like(long)])
    out = model(ids, mask, output_hidden_states=True)
    logits, stream = np.asarray(out.logits), np.asarray(out.hidden_states[1])
    far = logits[count:] if far is None else far
    return logits[:rows, :width], logits[rows:count, :width], stream[rows:count, :width], far


def test_logits_and_residual_stream_of_padded_full_and_long_rows(loaded):
    """Long ones go past every window and switch of a rope."""
    case, model = loaded
    x = case.arrays
    padded, full, stream, far = outputs(case, model)
    close(case, padded, x["logits"], x["attention_mask"])
    close(case, full, x["full_logits"])
    close(case, stream, x["full_hidden_1"])
    close(case, far, x["long_logits"])


@pytest.mark.parametrize(
    "loaded", [pytest.param((n, True), id=label(n, True)) for n in FOLDED], indirect=True
)
def test_logits_loss_and_gradient_norms_at_given_positions(loaded, tmp_path):
    """Those of plain layers, on meshes, are in test_golden_on_meshes.py."""
    case, model = loaded
    x = case.arrays
    logits, loss, grads = golden.logits_loss_and_gradients(case, model)
    close(case, logits, case.logits_pos, x["attention_mask"])
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
    close(case, outputs(case, model)[1], case.arrays["full_logits"])

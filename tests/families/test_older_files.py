"""Files as they were once written: without the model's prefix, with buffers, with tied heads."""

from __future__ import annotations

import json

import golden
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import flaxen
from flaxen.core.errors import CheckpointError


def written(folder, name, rename=lambda key: key, extra=None, **config):
    """A golden case in a folder, its tensors renamed and others beside them."""
    case = golden.case(name)
    golden.write_folder(case, folder)
    tensors = {rename(key): array for key, array in case.weights.items()} | (extra or {})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    about = folder / "config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | config))
    return tensors


def saved(model, folder):
    model.save(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("bloom", "transformer."), ("falcon", "transformer."), ("opt", "model.")],
)
def test_a_file_without_the_prefix_is_the_same_model(name, prefix, tmp_path):
    tensors = written(tmp_path, name, lambda key: key.removeprefix(prefix))
    model, case = flaxen.load(tmp_path), golden.case(name)
    (tmp_path / "plain").mkdir()
    plain = flaxen.load(golden.write_folder(case, tmp_path / "plain"))
    for (path, got), want in zip(
        model.parameters().items(), plain.parameters().values(), strict=True
    ):
        np.testing.assert_array_equal(got, want, err_msg=path)
    back = saved(model, tmp_path / "back")
    assert back.keys() == tensors.keys()
    assert all(back[key].tobytes() == array.tobytes() for key, array in tensors.items())


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("gpt_neox", "gpt_neox.layers.1.attention.rotary_emb.inv_freq"),
        ("gptj", "transformer.h.0.attn.bias"),
        ("gpt_neo", "transformer.h.1.attn.attention.bias"),
        ("gpt_bigcode", "transformer.bias"),
    ],
)
def test_masks_and_frequencies_in_a_file_are_no_weights(name, buffer, tmp_path):
    written(tmp_path, name, extra={buffer: np.zeros(4, np.float32)})
    assert flaxen.load(tmp_path).loading.unexpected == []


def test_a_bias_that_is_none_of_the_models_is_told(tmp_path):
    key = "transformer.h.0.attn.k_proj.bias"
    written(tmp_path, "gpt_bigcode", extra={key: np.zeros(4, np.float32)})
    with pytest.raises(CheckpointError, match="k_proj.bias"):
        flaxen.load(tmp_path)


def test_a_tied_head_may_stand_in_the_file_under_its_own_name(tmp_path):
    table = golden.case("gpt_neox").weights["gpt_neox.embed_in.weight"]
    extra = {"embed_out.weight": table}
    tensors = written(tmp_path, "gpt_neox", extra=extra, tie_word_embeddings=True)
    model = flaxen.load(tmp_path)
    assert model.module.lm_head is None
    assert model.loading.unexpected == []
    back = saved(model, tmp_path / "back")
    assert back.keys() == tensors.keys()

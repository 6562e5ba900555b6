"""Models of pictures, alone or beside texts, against Transformers on torch."""

from __future__ import annotations

import golden
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import flaxen
from flaxen.core.errors import ConfigError, InputError
from flaxen.pretrained import from_config

ALONE, TOWERS = golden.cases("vision"), golden.cases("clip")
LOGITS, LOSS, GRADIENTS = 5e-5, 1e-5, 1e-3
"""Bounds of tests/data/golden/README.md: absolute, absolute, relative."""


def close(got, want, mask=None, atol=LOGITS):
    error = np.abs(np.asarray(got) - want)
    assert (error if mask is None else error[mask == 1]).max() < atol


def same_bytes(model, case, folder):
    model.save(folder)
    back = load_file(folder / "model.safetensors")
    assert back.keys() == case.weights.keys()
    for name, want in case.weights.items():
        assert (back[name].dtype, back[name].shape) == (want.dtype, want.shape)
        assert back[name].tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("name", "how"),
    [(n, {}) for n in ALONE] + [("vit", {"scan_layers": True}), ("vit", {"mesh": "fsdp=4,tp=2"})],
)
def test_a_classifier_of_pictures(name, how, tmp_path):
    case = golden.case(name)
    model = flaxen.load(golden.write_folder(case, tmp_path), **how)
    x = case.arrays

    @jax.jit
    def run(model):
        def loss(model):
            given = {"pixel_values": x["pixel_values"], "labels": x["labels"]}
            out = model(**given, output_hidden_states=True)
            return out.loss, out

        return jax.value_and_grad(loss, has_aux=True)(model)

    (loss, out), grads = run(model)
    close(out.logits, x["logits"])
    close(out.hidden_states[1], x["hidden_1"])
    assert abs(loss - x["loss"]) < LOSS
    if "other_logits" in x:
        given = {"pixel_values": x["other_pixel_values"]}
        close(model(**given, interpolate_pos_encoding=True).logits, x["other_logits"])
    grads.save(tmp_path / "grads")
    hub = load_file(tmp_path / "grads" / "model.safetensors")
    for key, norm in case.grad_norms.items():
        assert np.linalg.norm(hub[key]) == pytest.approx(norm, rel=GRADIENTS, abs=1e-7), key
    same_bytes(model, case, tmp_path / "back")


@pytest.mark.parametrize(
    ("name", "how"),
    [(n, {}) for n in TOWERS] + [("siglip", {"mesh": "fsdp=4,tp=2", "scan_layers": True})],
)
def test_two_towers(name, how, tmp_path):
    case = golden.case(name)
    model = flaxen.load(golden.write_folder(case, tmp_path), **how)
    x = case.arrays
    mask = x.get("attention_mask")
    out = model(x["input_ids"], mask, pixel_values=x["pixel_values"])
    for key in ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds"):
        close(getattr(out, key), x[key])
    close(out.text_model_output.last_hidden_state, x["text_last_hidden_state"], mask)
    close(out.text_model_output.pooler_output, x["text_pooler_output"])
    close(out.vision_model_output.last_hidden_state, x["vision_last_hidden_state"])
    close(out.vision_model_output.pooler_output, x["vision_pooler_output"])
    same_bytes(model, case, tmp_path / "back")


@pytest.mark.parametrize("name", [*ALONE, *TOWERS])
def test_a_sparse_config_means_the_same(name, tmp_path):
    case = golden.case(name)
    model = flaxen.load(golden.write_folder(case, tmp_path, sparse=True))
    given = {"pixel_values": case.arrays["pixel_values"]}
    if name in ALONE:
        close(model(**given).logits, case.arrays["logits"])
    else:
        close(model(**given).image_embeds, case.arrays["image_embeds"])


def test_texts_alone_and_pairs(tmp_path):
    case = golden.case("clip")
    model = flaxen.load(golden.write_folder(case, tmp_path))
    x = case.arrays
    texts = model(x["input_ids"], x["attention_mask"])
    close(texts.text_embeds, x["text_embeds"])
    assert texts.logits_per_text is None
    out = model(x["input_ids"][:2], pixel_values=x["pixel_values"], return_loss=True)
    logits = np.asarray(out.logits_per_text)
    rows = [x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (logits, logits.T)]
    assert float(out.loss) == pytest.approx(-np.mean([np.diag(x) for x in rows]), rel=1e-5)
    with pytest.raises(InputError, match="as many texts as pictures"):
        model(x["input_ids"], pixel_values=x["pixel_values"], return_loss=True)
    with pytest.raises(InputError, match="input_ids or pixel_values is missing"):
        model(attention_mask=x["attention_mask"])


def test_what_is_no_picture_of_the_model_is_refused(tmp_path):
    model = flaxen.load(golden.write_folder(golden.case("vit"), tmp_path))
    pixels = golden.case("vit").arrays["pixel_values"]
    with pytest.raises(InputError, match="40 x 32 pixels; this model was made for 32 x 32"):
        model(pixel_values=np.zeros((1, 3, 40, 32), np.float32))
    with pytest.raises(InputError, match="expected floats of shape"):
        model(pixel_values=pixels[:, :1])
    with pytest.raises(InputError, match="pixel_values is missing"):
        model(labels=np.array([1, 2]))
    with pytest.raises(InputError, match="does not take input_ids"):
        model(np.zeros((1, 3), int))
    with pytest.raises(InputError, match="cannot generate"):
        model.generate(np.zeros((1, 3), int))


def test_heads_and_kinds_that_are_not_here_are_refused():
    raw = golden.case("vit").config
    with pytest.raises(ConfigError, match="expected one of ViTModel"):
        from_config(raw | {"architectures": ["ViTForMaskedImageModeling"]}, abstract=True)
    with pytest.raises(ConfigError, match="holds no patch"):
        from_config(raw | {"image_size": 4}, abstract=True)


def test_fresh_models_run(tmp_path):
    raw = golden.case("vit").config | {"architectures": ["ViTModel"]}
    model = from_config(raw)
    out = model(pixel_values=np.zeros((2, 3, 32, 32), np.float32), output_attentions=True)
    assert out.pooler_output.shape == (2, 64)
    assert out.attentions[1].shape == (2, 4, 17, 17)
    assert model.explain()[0]["layers"] == 2

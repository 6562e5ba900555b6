"""The towers of CLIP and SigLIP and the encoder of T5 by themselves, against what Transformers on
torch computed inside of the whole models.
"""

from __future__ import annotations

import encoder_cases
import golden
import numpy as np
import pytest
from safetensors.numpy import load_file
from words import word_tokenizer

import flaxen
from flaxen.core.errors import ConfigError

BOUND = 5e-5
"""Of tests/data/golden/README.md."""
CLASSES = {
    "clip_text_model": "CLIPTextModel",
    "clip_vision_model": "CLIPVisionModel",
    "siglip_text_model": "SiglipTextModel",
    "siglip_vision_model": "SiglipVisionModel",
}


def config_of(kind, architecture):
    case, side = golden.case(kind.split("_")[0]), kind.split("_")[1]
    config = case.config[f"{side}_config"]
    width = {"projection_dim": case.config["projection_dim"]} if kind[0] == "c" else {}
    return config | width | {"model_type": kind, "architectures": [architecture]}


def tensors_of(kind, prefix):
    """Those of one side, with the prefix that the whole model has, or without."""
    case, side = golden.case(kind.split("_")[0]), kind.split("_")[1]
    start = f"{side}_model."
    return {
        name if prefix else name.removeprefix(start): x
        for name, x in case.weights.items()
        if name.startswith(start)
    }


def called(model, kind):
    x = golden.case(kind.split("_")[0]).arrays
    if "vision" in kind:
        return model(pixel_values=x["pixel_values"])
    return model(x["input_ids"], x.get("attention_mask"))


def close(got, want, mask=None):
    error = np.abs(np.asarray(got) - want)
    assert (error if mask is None else error[mask == 1]).max() < BOUND


@pytest.mark.parametrize("prefix", [False, True], ids=["newer names", "older names"])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_tower_gives_what_it_gives_in_the_whole_model(kind, prefix, tmp_path):
    weights = tensors_of(kind, prefix)
    encoder_cases.write(tmp_path, config_of(kind, CLASSES[kind]), weights)
    model = flaxen.load(tmp_path)
    out, x, side = called(model, kind), golden.case(kind.split("_")[0]).arrays, kind.split("_")[1]
    mask = x.get("attention_mask") if side == "text" else None
    close(out.last_hidden_state, x[f"{side}_last_hidden_state"], mask)
    close(out.pooler_output, x[f"{side}_pooler_output"])
    model.save(tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    assert all(back[name].tobytes() == weights[name].tobytes() for name in weights)


@pytest.mark.parametrize(
    ("kind", "head", "made"),
    [
        ("clip_text_model", "text_projection.weight", "text_embeds"),
        ("clip_vision_model", "visual_projection.weight", "image_embeds"),
    ],
)
def test_a_tower_with_its_projection(kind, head, made, tmp_path):
    weights = tensors_of(kind, True) | {head: golden.case("clip").weights[head]}
    config = config_of(kind, f"{CLASSES[kind]}WithProjection")
    encoder_cases.write(tmp_path, config, weights)
    vectors = np.asarray(getattr(called(flaxen.load(tmp_path), kind), made))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    close(unit, golden.case("clip").arrays[made])


def test_another_class_of_a_tower_is_refused(tmp_path):
    config = config_of("siglip_text_model", "SiglipTextModelWithProjection")
    encoder_cases.write(tmp_path, config, tensors_of("siglip_text_model", False))
    with pytest.raises(ConfigError, match="expected SiglipTextModel"):
        flaxen.load(tmp_path)


@pytest.mark.parametrize("name", ["t5", "t5_gated", "mt5", "umt5"])
def test_an_encoder_alone_gives_what_it_gives_in_the_whole_model(name, tmp_path):
    case = golden.case(name)
    kept = {k: x for k, x in case.weights.items() if k.startswith(("encoder.", "shared."))}
    ours = case.config["architectures"][0].replace("ForConditionalGeneration", "EncoderModel")
    encoder_cases.write(tmp_path, case.config | {"architectures": [ours]}, kept)
    model = flaxen.load(tmp_path)
    x = case.arrays
    out = model(x["input_ids"], x["attention_mask"], output_attentions=True)
    close(out.last_hidden_state, x["encoder_last_hidden_state"], x["attention_mask"])
    assert len(out.attentions) == case.config["num_layers"]
    word_tokenizer(41).save_pretrained(tmp_path)
    got = flaxen.load(tmp_path).embed("a b c")
    ids = np.array([flaxen.text.encode(word_tokenizer(41), "a b c")])
    close(got, np.asarray(model(ids).last_hidden_state)[0].mean(0))


@pytest.mark.parametrize("kind", ["clip", "clip_text_model", "siglip", "siglip_text_model"])
def test_texts_are_embedded_as_they_are_compared_with_pictures(kind, tmp_path):
    """SigLIP reads rows of full length, padding too, and no mask."""
    if kind in CLASSES:
        encoder_cases.write(tmp_path, config_of(kind, CLASSES[kind]), tensors_of(kind, False))
    else:
        golden.write_folder(golden.case(kind), tmp_path)
    tok = word_tokenizer(41)
    tok.save_pretrained(tmp_path)
    model = flaxen.load(tmp_path)
    rows = [flaxen.text.encode(tok, text) for text in ("a b c", "d")]
    most = model.module.longest()
    size = most if "siglip" in kind else 5
    ids = np.array([row + [tok.pad_token_id] * (size - len(row)) for row in rows])
    mask = None if "siglip" in kind else np.array([[1] * len(r) + [0] * (5 - len(r)) for r in rows])
    out = model(ids, mask)
    want = np.asarray(out.pooler_output if kind in CLASSES else out.text_embeds)
    want = want / np.linalg.norm(want, axis=1, keepdims=True)
    close(model.embed(["a b c", "d"]), want)

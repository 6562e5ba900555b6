"""Language models that see, against Transformers on torch."""

from __future__ import annotations

import json
import re

import golden
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import flaxen
from flaxen.core.errors import ConfigError, InputError
from flaxen.generate.loop import programs
from flaxen.generate.settings import resolve
from flaxen.models.vision_language import look
from flaxen.pretrained import from_config

CASES = [*golden.cases("qwen2_vl"), *golden.cases("seeing")]
LIKE = ["llava", "mistral3"]
"""Much like `llava_pixtral`."""
LOGITS, LOSS, GRADIENTS = 5e-5, 1e-5, 1e-3
"""Bounds of tests/data/golden/README.md: absolute, absolute, relative."""
GIVEN = ("pixel_values", "image_grid_thw", "image_sizes", "mm_token_type_ids")


def pictures(case):
    return {key: case.arrays[key] for key in GIVEN if key in case.arrays}


def close(got, want, mask=None, atol=LOGITS):
    error = np.abs(np.asarray(got) - want)
    assert (error if mask is None else error[mask == 1]).max() < atol


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((n, {}), marks=[pytest.mark.exhaustive] if n in LIKE else []) for n in CASES
    ]
    + [
        ("qwen2_vl", {"mesh": "fsdp=4,tp=2"}),
        ("gemma3", {"mesh": "fsdp=2,tp=2,sp=2", "scan_layers": True}),
    ],
    ids=lambda param: param[0] + ("-mesh" if param[1] else ""),
)
def loaded(request, tmp_path_factory):
    name, how = request.param
    case = golden.case(name)
    return case, flaxen.load(golden.write_folder(case, tmp_path_factory.mktemp(name)), **how)


def test_numbers_gradients_and_bytes(loaded, tmp_path):
    case, model = loaded
    x, given = case.arrays, pictures(case)
    mask = x["attention_mask"]

    @jax.jit
    def run(model):
        def loss(model):
            places = {"position_ids": x["position_ids"]} if "position_ids" in x else {}
            out = model(x["input_ids"], mask, labels=x["labels"], **given, **places)
            return out.loss, out

        return jax.value_and_grad(loss, has_aux=True)(model)

    (loss, out), grads = run(model)
    close(out.image_hidden_states, x["image_embeds"])
    close(out.logits, x["logits"], mask)
    assert abs(loss - x["loss"]) < LOSS
    alone = model.loss(x["input_ids"], x["labels"], mask, x.get("position_ids"), **given)
    assert abs(alone - x["loss"]) < LOSS
    grads.save(tmp_path / "grads")
    hub = load_file(tmp_path / "grads" / "model.safetensors")
    for key, norm in case.grad_norms.items():
        assert np.linalg.norm(hub[key]) == pytest.approx(norm, rel=GRADIENTS, abs=1e-6), key
    model.save(tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == case.weights.keys()
    for name, want in case.weights.items():
        assert (back[name].dtype, back[name].shape) == (want.dtype, want.shape)
        assert back[name].tobytes() == want.tobytes()


def test_greedy_tokens(loaded):
    case, model = loaded
    x = case.arrays
    new = x["gen_sequences"].shape[1] - x["input_ids"].shape[1]
    given = pictures(case) | {"max_new_tokens": new, "eos_token_id": []}
    got = model.generate(x["input_ids"], x["attention_mask"], **given)
    np.testing.assert_array_equal(got, x["gen_sequences"])


@pytest.mark.parametrize("name", CASES)
def test_a_sparse_config_and_newer_names_mean_the_same(name, tmp_path):
    case = golden.case(name)
    folder = golden.write_folder(case, tmp_path / "newer", sparse=True)
    newer = {rename(key): value for key, value in case.weights.items()}
    assert newer.keys() != case.weights.keys()
    save_file(newer, folder / "model.safetensors", metadata={"format": "pt"})
    model = flaxen.load(folder)
    x = case.arrays
    places = {"position_ids": x["position_ids"]} if "position_ids" in x else {}
    out = model(x["input_ids"], x["attention_mask"], **pictures(case), **places)
    close(out.logits, x["logits"], x["attention_mask"])
    model.save(tmp_path / "back")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == newer.keys()


def rename(key: str) -> str:
    """As the classes of Transformers call it since they have a model inside."""
    key = re.sub(r"^language_model\.lm_head", "lm_head", key)
    key = re.sub(r"^(language_model\.)?model\.", "model.language_model.", key)
    return re.sub(r"^(visual|vision_tower|multi_modal_projector)\.", r"model.\1.", key)


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_files_of_the_time_when_towers_had_a_model_inside(name, tmp_path):
    case = golden.case(name)
    folder = golden.write_folder(case, tmp_path)
    older = {
        re.sub(r"^vision_tower\.", "vision_tower.vision_model.", k): v
        for k, v in case.weights.items()
    }
    save_file(older, folder / "model.safetensors", metadata={"format": "pt"})
    model = flaxen.load(folder)
    model.save(tmp_path / "back")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == older.keys()


def test_positions_of_pictures_and_words(tmp_path):
    case = golden.case("qwen2_vl")
    model, x = flaxen.load(golden.write_folder(case, tmp_path)), case.arrays
    given = {key: x[key] for key in ("pixel_values", "image_grid_thw")}
    sight, count = model.module.see(x["input_ids"], None, given, model.runtime)
    np.testing.assert_array_equal(sight.positions, x["mrope_position_ids"])
    np.testing.assert_array_equal(sight.shift[:, None], x["rope_deltas"])
    assert count == len(x["image_embeds"])
    close(model(x["text_input_ids"]).logits, x["text_logits"])


def test_calls_with_a_cache_go_on_behind_the_picture(tmp_path):
    case = golden.case("qwen2_vl")
    model, x = flaxen.load(golden.write_folder(case, tmp_path)), case.arrays
    cache = model.init_cache(1, 40)
    out = model(x["input_ids"], past_key_values=cache, **pictures(case))
    close(out.logits, x["logits"])
    tokens = [int(out.logits[0, -1].argmax())]
    for _ in range(3):
        out = model(np.array([tokens[-1:]]), past_key_values=out.past_key_values)
        tokens.append(int(out.logits[0, -1].argmax()))
    assert tokens == x["gen_sequences"][0, x["input_ids"].shape[1] :][:4].tolist()


def test_pictures_of_other_sizes_meet_programs_that_are_there(tmp_path):
    case = golden.case("qwen2_vl")
    model = flaxen.load(golden.write_folder(case, tmp_path))
    rng, counts = np.random.default_rng(0), []
    for grid in ([1, 4, 4], [1, 6, 4], [1, 4, 8]):
        tokens = grid[1] * grid[2] // 4
        ids = np.array([[5, *[120] * tokens, 7, 8, 9]])
        pixels = rng.normal(size=(grid[1] * grid[2], 96)).astype(np.float32)
        model.generate(ids, pixel_values=pixels, image_grid_thw=[grid], max_new_tokens=2)
        counts.append((look._cache_size(), programs()))
    assert counts[0] == counts[1] == counts[2]


def test_a_compiled_step_is_given_the_positions(tmp_path):
    case = golden.case("qwen2_vl")
    model, x = flaxen.load(golden.write_folder(case, tmp_path)), case.arrays
    run = jax.jit(lambda ids, **more: model(ids, **pictures(case), **more).logits)
    with pytest.raises(InputError, match="pass position_ids"):
        run(x["input_ids"])
    close(run(x["input_ids"], position_ids=x["mrope_position_ids"]), x["logits"])


def test_films(tmp_path):
    """A film of one frame and a picture are the same to the vision model."""
    case = golden.case("qwen2_vl")
    model, x = flaxen.load(golden.write_folder(case, tmp_path)), case.arrays
    ids = np.where(x["input_ids"] == 120, 121, x["input_ids"])
    film = {"pixel_values_videos": x["pixel_values"], "video_grid_thw": x["image_grid_thw"]}
    out = model(ids, **film)
    close(out.image_hidden_states, x["image_embeds"])
    close(out.logits, x["logits"])


def test_what_does_not_fit_together_is_refused(tmp_path):
    case = golden.case("qwen2_vl")
    model, x = flaxen.load(golden.write_folder(case, tmp_path)), case.arrays
    given = {key: x[key] for key in ("pixel_values", "image_grid_thw")}
    with pytest.raises(InputError, match="have 7 places for pictures"):
        ids = x["input_ids"].copy()
        ids[0, list(ids[0]).index(120)] = 5
        model(ids, **given)
    with pytest.raises(InputError, match="belong together"):
        model(x["input_ids"], pixel_values=x["pixel_values"])
    with pytest.raises(InputError, match="one row for each patch"):
        model(x["input_ids"], pixel_values=x["pixel_values"][:-1], image_grid_thw=[[1, 4, 8]])
    with pytest.raises(InputError, match="mm_token_type_ids says otherwise"):
        model(x["input_ids"], mm_token_type_ids=1 - x["mm_token_type_ids"], **given)


def test_a_model_without_eyes_takes_no_pictures(tmp_path):
    model = flaxen.load(golden.write_folder(golden.case("llama"), tmp_path))
    with pytest.raises(InputError, match="takes no pictures"):
        model.generate(np.array([[1, 2]]), pixel_values=np.zeros((1, 3, 8, 8)))


def test_keys_of_the_models_inside_are_read_or_refused():
    raw = golden.case("llava").config
    raw = json.loads(json.dumps(raw))
    raw["text_config"]["model_type"] = "gpt2"
    with pytest.raises(ConfigError, match="Llama's tensors"):
        from_config(raw, abstract=True)
    raw = golden.case("gemma3").config | {"mm_tokens_per_image": 9}
    with pytest.raises(ConfigError, match="mm_tokens_per_image=9"):
        from_config(raw, abstract=True)


def test_the_words_are_those_of_the_text_config(tmp_path):
    case = golden.case("qwen2_vl")
    model = flaxen.load(golden.write_folder(case, tmp_path))
    assert resolve(model, 3, {}).eos_token_id == (2,)
    wider = model.resize_token_embeddings(140)
    assert wider.config.text_config.vocab_size == 140
    wider.save(tmp_path / "wider")
    assert flaxen.load(tmp_path / "wider").module.embed_tokens.vocab_size == 140


def test_a_width_that_only_a_tower_alone_has_is_allowed(tmp_path):
    """The config of LLaVA 1.5 says projection_dim=768, which nothing in it is made of."""
    case = golden.case("llava")
    golden.write_folder(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["projection_dim"] = 768
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert flaxen.load(tmp_path, abstract=True).loading.missing == []


@pytest.mark.parametrize("name", ["vit", "llava", "mistral3"])
def test_no_pictures_at_all_are_refused(name):
    vision = from_config(golden.case(name).config)
    given = {"input_ids": np.full((1, 4), 5)} if name != "vit" else {}
    with pytest.raises(InputError, match="expected .*as the image processor makes them"):
        vision(**given, pixel_values=np.zeros((0, 3, 16, 16), np.float32))

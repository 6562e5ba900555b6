"""RoPE settings mean the same in the keys of Transformers 4, of Transformers 5, and in both."""

from __future__ import annotations

import json
import logging

import pytest
import transformers
from golden import DATA

from flaxen.core.errors import ConfigError
from flaxen.families.config import abstract_module, hf_config
from flaxen.families.rope_keys import both_spellings, check_layers, one_spelling

STANDARD = json.loads((DATA / "unit" / "rope.json").read_text())["standardize"]
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONG = {"original_max_position_embeddings": 16}
LISTS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
TYPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "beta_fast": 16, **LONG},
    "longrope": {**LISTS, **LONG},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG},
    "proportional": {},
}
every_type = pytest.mark.parametrize("kind", TYPES)


@pytest.fixture(autouse=True)
def quiet():
    """Transformers logs what it thinks of settings."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def ropes(model_type="llama", **more):
    module = abstract_module(hf_config({"model_type": model_type, **TINY, **more}))[0]
    found = [layer.self_attn.rope for layer in module.layers]
    return [dict(r.parameters) | {"type": r.kind, "dim": r.dim} for r in found]


@every_type
def test_every_type_in_either_generation(kind):
    new = ropes(rope_parameters={"rope_type": kind, "rope_theta": 5e5, **TYPES[kind]})
    assert new[0]["rope_theta"] == 5e5
    for name in ("type", "rope_type"):
        assert ropes(rope_theta=5e5, rope_scaling={name: kind, **TYPES[kind]}) == new


@every_type
def test_an_exported_file_is_read_alike_by_old_keys_by_new_ones_and_by_both(kind):
    raw = {"model_type": "llama", **TINY}
    raw["rope_parameters"] = {"rope_type": kind, "rope_theta": 5e5, **TYPES[kind]}
    both = both_spellings(raw)
    older = {k: v for k, v in both.items() if k != "rope_parameters"}
    want = hf_config(raw).rope_parameters
    assert hf_config(both).rope_parameters == hf_config(older).rope_parameters == want
    # Transformers reads the file without our help too; it completes it when it builds a model.
    theirs = transformers.LlamaConfig(**json.loads(json.dumps(both)))
    theirs.standardize_rope_params()
    assert theirs.rope_parameters == want


@pytest.mark.parametrize("case", STANDARD, ids=lambda case: case["cls"])
def test_config_classes_get_what_they_would_get_from_transformers(case):
    if "error" in case:
        assert not hasattr(transformers, case["cls"])
        return
    made = getattr(transformers, case["cls"])(**one_spelling(case["kwargs"]))
    assert made.rope_parameters == case["rope_parameters"]


def test_theta_is_not_lost_where_both_generations_stand_in_a_file():
    """Transformers takes `rope_scaling` alone then, and 10000 for theta."""
    scaling = {"rope_type": "linear", "factor": 4.0}
    both = ropes(rope_parameters={**scaling, "rope_theta": 5e5}, rope_scaling=scaling)
    assert both == ropes(rope_parameters={**scaling, "rope_theta": 5e5})


def test_what_was_loaded_is_not_reset():
    more = {"rope_theta": 5e5, "tie_word_embeddings": True, "attention_bias": True}
    config = hf_config({"model_type": "llama", **TINY, **more})
    module = abstract_module(config)[0]
    assert config.rope_parameters["rope_theta"] == module.layers[0].self_attn.rope["rope_theta"]
    assert module.layers[0].self_attn.rope["rope_theta"] == 5e5
    assert module.lm_head is None
    assert module.layers[0].self_attn.q_proj.bias is not None


def phi3(**more):
    return hf_config({"model_type": "phi3", **TINY, **more}).rope_parameters


def test_su_is_longrope():
    want = phi3(**LONG, rope_scaling={"type": "longrope", **LISTS})
    assert phi3(**LONG, rope_scaling={"type": "su", **LISTS}) == want
    assert want["rope_type"] == "longrope" and want["original_max_position_embeddings"] == 16


def test_phi3_takes_the_length_of_pretraining_from_where_it_stands():
    inside = phi3(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **LISTS, **LONG})
    assert inside["original_max_position_embeddings"] == 16


def test_phi3_is_written_as_transformers_4_wants_it():
    """Three fields, `type` among them; the rest at the top level."""
    fields = {"rope_type": "longrope", "rope_theta": 5e5, **LISTS, **LONG}
    out = both_spellings({"model_type": "phi3", "rope_parameters": fields})
    assert out["rope_scaling"] == {"type": "longrope", **LISTS}
    assert (out["rope_theta"], out["original_max_position_embeddings"]) == (5e5, 16)
    sharper = {**fields, "attention_factor": 1.2}
    out = both_spellings({"model_type": "phi3", "rope_parameters": sharper})
    assert out["rope_scaling"]["attention_factor"] == 1.2


def test_su_is_written_as_longrope():
    out = both_spellings({"model_type": "phi3", "rope_scaling": {"type": "su", **LISTS}})
    assert out["rope_scaling"] == {"type": "longrope", **LISTS}


def test_sections_are_kept_in_either_spelling():
    fields = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    raw = {"model_type": "qwen2_vl_text", "rope_parameters": fields}
    out = both_spellings(raw)
    assert out["rope_scaling"]["type"] == "mrope"
    older = {k: v for k, v in out.items() if k != "rope_parameters"}
    for spelling in (raw, out, older):
        kept = {k: v for k, v in one_spelling(spelling).items() if k != "model_type"}
        found = transformers.Qwen2VLTextConfig(**kept).rope_parameters
        assert {k: v for k, v in found.items() if k != "type"} == fields


def test_names_of_their_own_are_written_for_older_versions():
    fields = {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5}
    out = both_spellings({"model_type": "gpt_neox", "rope_parameters": fields})
    assert (out["rotary_emb_base"], out["rotary_pct"]) == (2e4, 0.5)
    layers = {
        "full_attention": {"rope_theta": 2e5, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    out = both_spellings({"model_type": "modernbert", "rope_parameters": layers})
    assert (out["global_rope_theta"], out["local_rope_theta"]) == (2e5, 1e4)


@pytest.mark.parametrize(
    "more, words",
    [
        ({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, "type="),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 1.0}}, "rope_theta"),
        ({"rope_scaling": {"factor": 2.0}}, "without the rope_type"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, **LONG}}, "original_max"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=1.0"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "Unknown rope_type|not usable"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(more, words):
    top = {"original_max_position_embeddings": 8, "rope_theta": 5e5, "partial_rotary_factor": 1.0}
    with pytest.raises(ConfigError, match=words):
        ropes(**top, **more)


def test_settings_for_all_layers_are_not_ignored_where_each_kind_has_its_own():
    """Gemma 3 would turn with its default thetas."""
    with pytest.raises(ConfigError, match="factor=8.0 for all layers and full_attention="):
        ropes("gemma3_text", rope_parameters={"rope_type": "linear", "factor": 8.0})
    check_layers({"full_attention": {"rope_theta": 1e4}, "sliding_attention": None})


def test_an_older_base_of_olmo3_is_of_all_its_layers():
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    scaling = {"rope_type": "linear", "factor": 2.0}
    older = {"rope_theta": 1000.0, "rope_scaling": scaling, "layer_types": layers}
    found = ropes("olmo3", sliding_window=4, **older)
    assert [r["rope_theta"] for r in found] == [1000.0] * 3
    assert [r["type"] for r in found] == ["default", "linear", "default"]

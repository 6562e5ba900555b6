"""What a config says is what is built; what is not understood is refused."""

from __future__ import annotations

import golden
import pytest

from flaxen.core.errors import ConfigError
from flaxen.families.config import abstract_module, hf_config
from flaxen.families.rope_keys import both_spellings

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def build(model_type="llama", **more):
    return abstract_module(hf_config({"model_type": model_type, **TINY, **more}))[0]


def windows(module):
    return [layer.self_attn.mask.window for layer in module.layers]


def test_explicit_head_dim():
    assert build(head_dim=12).layers[0].self_attn.q_proj.weight.shape == (4, 12, 32)


def test_null_head_dim_and_null_kv_heads():
    attn = build(head_dim=None, num_key_value_heads=None).layers[0].self_attn
    assert attn.q_proj.weight.shape == attn.k_proj.weight.shape == (4, 8, 32)


def test_a_window_that_is_switched_off():
    assert windows(build("qwen2", use_sliding_window=False, sliding_window=4)) == [None] * 3


def test_a_window_from_some_layer_on():
    on = build("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert windows(on) == [None, 4, 4]


def test_layer_types_win():
    types = ["sliding_attention", "full_attention", "full_attention"]
    more = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    assert windows(build("qwen2", layer_types=types, **more)) == [4, None, None]


@pytest.mark.parametrize("none", [0, None])
def test_no_window(none):
    assert windows(build("mistral", sliding_window=none)) == [None] * 3


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def test_both_generations_of_rope_keys_are_equal():
    new = build(rope_parameters={"rope_theta": 5e5, **LLAMA3})
    old = build(rope_theta=5e5, rope_scaling=LLAMA3)
    renamed = {("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()}
    older = build(rope_theta=5e5, rope_scaling=renamed)
    frequencies = [m.layers[0].self_attn.rope for m in (new, old, older)]
    keys = ("rope_theta", *LLAMA3)
    assert len({tuple(r[k] for k in keys) for r in frequencies}) == 1
    assert frequencies[0]["rope_theta"] == 5e5


def test_rope_per_layer_type_in_both_generations():
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    a = build("gemma3_text", layer_types=types, rope_parameters=new)
    b = build("gemma3_text", layer_types=types, **old)
    ropes = lambda m: [
        (x.self_attn.rope["rope_theta"], x.self_attn.rope.get("factor")) for x in m.layers
    ]
    assert ropes(a) == ropes(b) == [(1e4, None), (1e6, 8.0), (1e4, None)]


@pytest.mark.parametrize(
    "old", [{"rope_theta": 1e4}, {"rope_scaling": {"type": "llama3", "factor": 2.0}}]
)
def test_contradicting_rope_keys_are_an_error(old):
    with pytest.raises(ConfigError, match="older keys"):
        build(rope_parameters={"rope_theta": 5e5, **LLAMA3}, **old)


def test_an_exported_config_is_read_alike_from_either_spelling():
    raw = {"model_type": "llama", **TINY, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}
    out = both_spellings(raw)
    assert out["rope_theta"] == 5e5
    assert out["rope_scaling"]["rope_type"] == "llama3"
    older = {k: v for k, v in out.items() if k != "rope_parameters"}
    ropes = [hf_config(c).rope_parameters for c in (raw, out, older)]
    assert ropes[0] == ropes[1] == ropes[2]


def experts(module):
    return [hasattr(layer.mlp, "experts") for layer in module.layers]


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_dense_layers_among_mixtures(kind):
    more = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    assert experts(build(kind, **more)) == [True] * 3
    assert experts(build(kind, mlp_only_layers=[0, 2], **more)) == [False, True, False]
    assert experts(build(kind, decoder_sparse_step=2, **more)) == [False, True, False]
    dense = build(kind, mlp_only_layers=[0], **more).layers[0].mlp
    assert dense.up_proj.weight.shape == (48, 32)


def test_weights_of_a_mixture_are_scaled_to_one_where_the_config_says_so():
    more = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    kinds = {
        type(build("qwen3_moe", norm_topk_prob=on, **more).layers[0].mlp.gate).__name__
        for on in (False, True)
    }
    assert kinds == {"Router", "NormalisedRouter"}


@pytest.mark.parametrize("key, value", [("router_jitter_noise", 0.1)])
def test_what_changes_a_mixture_in_training_is_refused(key, value):
    with pytest.raises(ConfigError, match=key):
        build("mixtral", **{key: value})


def gpt2(**more):
    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return abstract_module(hf_config({"model_type": "gpt2", **sizes, **more}))[0]


def test_gpt2_scales_scores_as_its_config_says():
    scales = lambda **more: [layer.self_attn.scale for layer in gpt2(**more).layers]
    assert scales() == [8**-0.5] * 2
    assert scales(scale_attn_weights=False) == [1.0] * 2
    assert scales(scale_attn_by_inverse_layer_idx=True) == [8**-0.5, 8**-0.5 / 2]


def test_gpt2_inner_width():
    assert gpt2().layers[0].mlp.up_proj.weight.shape == (128, 32)
    assert gpt2(n_inner=40).layers[0].mlp.up_proj.weight.shape == (40, 32)


def test_gpt2_without_a_decoder_is_refused():
    with pytest.raises(ConfigError, match="add_cross_attention"):
        gpt2(add_cross_attention=True)


def falcon(**more):
    sizes = {k: v for k, v in TINY.items() if k not in ("num_key_value_heads", "intermediate_size")}
    return abstract_module(hf_config({"model_type": "falcon", **sizes, **more}))[0].layers[0]


def test_the_three_forms_of_falcon():
    kinds = {
        "7b": falcon(),
        "40b": falcon(new_decoder_architecture=True, num_kv_heads=2),
        "11b": falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
        "rw": falcon(multi_query=False, parallel_attn=False, alibi=True),
    }
    heads = {name: x.self_attn.k_proj.weight.shape[0] for name, x in kinds.items()}
    assert heads == {"7b": 1, "40b": 2, "11b": 2, "rw": 4}
    names = {name: type(x).__name__ for name, x in kinds.items()}
    assert set(names.values()) == {"ParallelBlock", "Block"}
    assert names["rw"] == "Block"
    two = lambda x: hasattr(x.mlp_layernorm, "weight")
    assert [two(kinds[n]) for n in ("7b", "40b", "11b")] == [False, True, False]
    assert [x.self_attn.rope is None for x in kinds.values()] == [False, False, False, True]
    # Scaled together with the scores, by 8 ** -0.5.
    assert kinds["rw"].self_attn.slopes[0] == pytest.approx(2**-2 * 8**-0.5)


@pytest.mark.parametrize(
    "more",
    [
        {"num_ln_in_parallel_attn": 2},
        {"new_decoder_architecture": True, "parallel_attn": False},
    ],
)
def test_a_falcon_that_does_not_exist_is_refused(more):
    with pytest.raises(ConfigError, match="num_ln_in_parallel_attn"):
        falcon(**more)


@pytest.mark.parametrize("key, value", [("qk_ln", True), ("alibi", False), ("prefix_lm", True)])
def test_what_transformers_overlooks_in_an_mpt_is_refused(key, value):
    with pytest.raises(ConfigError, match=key):
        abstract_module(hf_config({"model_type": "mpt", "attn_config": {key: value}}))


def test_an_mpt_with_biases_is_refused():
    with pytest.raises(ConfigError, match="no_bias"):
        abstract_module(hf_config({"model_type": "mpt", "no_bias": False}))


def test_gpt_neo_looks_far_in_every_second_layer():
    raw = {"model_type": "gpt_neo", "num_layers": 4, "attention_types": [[["global", "local"], 2]]}
    module = abstract_module(hf_config({**raw, "window_size": 7}))[0]
    assert windows(module) == [None, 7, None, 7]


def test_a_tied_head_keeps_its_bias():
    tied = build("phi", tie_word_embeddings=True)
    assert tied.lm_head is None
    assert tied.embed_tokens.bias.shape == (97,)
    assert build("phi").lm_head.bias.shape == (97,)


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3_text"])
def test_attention_in_both_directions_is_refused(kind):
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        build(kind, use_bidirectional_attention=True)


def test_layers_that_are_left_out_in_training_are_refused():
    with pytest.raises(ConfigError, match="layerdrop"):
        build("opt", layerdrop=0.1)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def test_phi3_turns_part_of_a_head_if_asked():
    half = {k: v[:2] for k, v in FACTORS.items()}
    module = build("phi3", rope_parameters={**LONG, **half, "partial_rotary_factor": 0.5})
    assert module.layers[0].self_attn.rope.dim == 4


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"long_factor": [1.0] * 3}, "long_factor"),
        ({"short_factor": [1.0, 1.0, 1.0, -1.0]}, "short_factor"),
    ],
)
def test_longrope_factors_that_do_not_fit_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        build("phi3", rope_parameters={**LONG, **FACTORS, **wrong})


def test_an_unknown_family_names_the_nearest():
    with pytest.raises(ConfigError, match="No family for model_type 'lama'. Did you mean 'llama'"):
        hf_config({"model_type": "lama"})


def test_no_model_type():
    with pytest.raises(ConfigError, match="no model_type"):
        hf_config({"hidden_size": 3})


def test_a_key_that_changes_the_numbers_and_is_not_handled_is_refused():
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        build("gemma3_text", use_bidirectional_attention=True)


def test_an_unknown_activation_is_named():
    with pytest.raises(ConfigError, match="Unknown activation 'sillu'. Did you mean 'silu'"):
        build(hidden_act="sillu")


def test_keys_that_no_config_class_declares_are_only_reported():
    config = hf_config({"model_type": "llama", **TINY, "is_llama_config": True})
    assert abstract_module(config)[2].unread() == {"is_llama_config": True}


def test_a_window_that_no_layer_uses_is_no_problem():
    module = build("gemma3_text", sliding_window=4, layer_types=["full_attention"] * 3)
    assert windows(module) == [None] * 3


def test_gemma3_does_not_cap_attention_scores():
    """Its config class declares the key, and Transformers does not use it."""
    module = build("gemma3_text", attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    assert module.layers[0].self_attn.softcap is None
    assert module.logit_softcap == 3.0


def test_quantised_weights_are_refused():
    with pytest.raises(ConfigError, match="quantization_config"):
        build(quantization_config={"quant_method": "fp8"})


def test_a_rotation_of_part_of_the_head_is_refused():
    with pytest.raises(ConfigError, match="turns 4 of 8 channels"):
        build(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})


def test_nan_in_a_config_is_refused():
    with pytest.raises(ConfigError, match="NaN for rms_norm_eps"):
        build(rms_norm_eps=float("nan"))


@pytest.mark.parametrize("classes", [5, "LlamaForCausalLM", [["LlamaForCausalLM"]], [None]])
def test_architectures_that_are_no_names_are_refused(classes):
    with pytest.raises(ConfigError, match="architectures=.*expected a list of names"):
        build(architectures=classes)


def test_an_absurd_number_of_layers_is_refused():
    with pytest.raises(ConfigError, match="num_hidden_layers=2000000000; expected at most"):
        build(num_hidden_layers=2_000_000_000)


@pytest.mark.parametrize(
    ("name", "key"),
    [("bloom", "n_head"), ("bart", "decoder_attention_heads"), ("llama", "head_dim")],
)
@pytest.mark.parametrize(("value", "words"), [(10**9, "at most"), (0, "1 or more")])
def test_an_absurd_number_of_heads_or_channels_is_refused(name, key, value, words):
    with pytest.raises(ConfigError, match=f"{key}={value}; expected {words}"):
        abstract_module(hf_config(golden.case(name).config | {key: value}))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("llama", {"intermediate_size": -4}, "intermediate_size=-4; expected 0 or more"),
        ("gpt2", {"n_inner": -4}, "up_proj.weight would have -4 mlp"),
        ("bert", {"max_position_embeddings": 0}, "embed_positions.weight would have 0 positions"),
        ("mamba", {"intermediate_size": 1.5}, "would have .*1.5 mlp"),
        ("mamba", {"conv_kernel": 0}, "conv_kernel=0; expected 1 or more"),
        ("bert", {"hidden_dropout_prob": 2.0}, "hidden_dropout_prob=2.0; expected at most 1"),
        ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0; expected 0 or more"),
        ("llama", {"num_key_value_heads": 3}, "4 query heads cannot .* among 3 key heads"),
        ("bamba", {"mamba_n_groups": 3}, "heads cannot be shared evenly among 3 groups"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "3 value heads cannot .* among 2 key heads"),
        ("qwen2_5_vl", {"vision_config": {"depth": 10**9}}, "depth=1000000000; expected at most"),
        ("mamba2", {"chunk_size": 0}, "chunk_size=0; expected 1 or more"),
        ("bamba", {"mamba_chunk_size": -2}, "mamba_chunk_size=-2; expected 1 or more"),
        ("minimax", {"block_size": 0}, "block_size=0; expected 1 or more"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank=0; expected 1 or more"),
        ("glm4_moe", {"n_group": 0}, "n_group=0; expected 1 or more"),
        ("llava_pixtral", {"vision_config": {"patch_size": 0}}, "patch_size=0; expected 1 or more"),
        ("qwen2_vl", {"vision_config": {"spatial_merge_size": 0}}, "spatial_merge_size=0"),
        (
            "llama4_text",
            {"attention_chunk_size": -1},
            "attention_chunk_size=-1; expected 1 or more",
        ),
        ("mistral", {"sliding_window": -1}, "of -1 tokens shows nothing; expected 1 or more"),
        ("gpt_neo", {"window_size": 0}, "window_size=0; expected 1 or more"),
        ("t5", {"relative_attention_num_buckets": 2}, "expected 4 buckets or more"),
        ("umt5", {"relative_attention_max_distance": 16}, "more than half as many"),
    ],
)
def test_sizes_of_which_there_is_no_model_are_refused(name, change, words):
    with pytest.raises(ConfigError, match=words):
        abstract_module(hf_config(golden.case(name).config | change))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("bart", {"no_repeat_ngram_size": 0}),
        ("granitemoeshared", {"shared_intermediate_size": 0}),
        ("bert", {"chunk_size_feed_forward": 0}),
    ],
)
def test_sizes_that_may_be_zero_are_no_fault(name, more):
    abstract_module(hf_config(golden.case(name).config | more))


def test_a_config_may_have_labels_by_number():
    config = {**TINY, "model_type": "llama", "id2label": {0: "no", 1: "yes"}}
    assert len(abstract_module(hf_config(config))[0].layers) == 3


def test_fewer_than_no_layers_are_refused():
    with pytest.raises(ConfigError, match="num_hidden_layers=-1; expected 0 or more"):
        build(num_hidden_layers=-1)


def test_a_value_that_a_family_cannot_count_with_is_named_among_those_read_last():
    config = golden.case("bart").config | {"d_model": None}
    with pytest.raises(ConfigError, match="No bart model.*Read last were .*d_model=None"):
        abstract_module(hf_config(config))


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_attention_heads"])
def test_a_size_of_zero_is_refused(key):
    with pytest.raises(ConfigError, match=f"{key}=0; expected 1 or more"):
        build(**{key: 0})


def test_a_dtype_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="not usable"):
        build(dtype=1e308)


@pytest.mark.parametrize(
    "rope, words",
    [
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"rope_theta": "1e4"}, "rope_theta='1e4'"),
        ({"rope_theta": 1e4, "rope_type": "linear", "factor": 0.0}, "factor=0.0"),
        ({"rope_theta": 1e4, "rope_type": 5}, "Unknown rope_type 5"),
        ({"full_attention": {"rope_theta": 1e6}}, "full_attention="),
        ([1], "expected an object"),
    ],
)
def test_rope_settings_that_make_no_sense_are_refused(rope, words):
    with pytest.raises(ConfigError, match=words):
        build(rope_parameters=rope)

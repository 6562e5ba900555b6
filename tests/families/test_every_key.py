"""Every key of every config changes the abstract model, is refused, or is listed here.

`HARMLESS` in families/family.py are the keys that mean nothing to any family.
"""

from __future__ import annotations

import encoder_cases
import golden
import pytest

from flaxen.core.errors import ConfigError
from flaxen.families import FILES
from flaxen.families.config import abstract_module, hf_config
from flaxen.families.family import HARMLESS

SUMMARY = ("first_dropout", "proj_to_labels", "type", "use_proj")
"""Of GPT-2's head for multiple choice."""

QUIET = {
    # How a float32 result is computed, not what it is.
    "bloom": {"slow_but_exact"},
    "gpt2": {"reorder_and_upcast_attn"} | {f"summary_{key}" for key in SUMMARY},
    "gpt_bigcode": {
        "attention_softmax_in_fp32",
        "num_key_value_heads",
        "scale_attention_softmax_in_fp32",
    },
    "jamba": {"use_associative_scan", "use_mamba_kernels", "use_mambapy"},
    "bamba": {"mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient"},
    "granitemoehybrid": {"mamba_chunk_size"},
    "minimax": {"block_size"},
    # Transformers does not read them, or derives them from others.
    "deepseek_v2": {"head_dim", "norm_topk_prob", "qk_head_dim"},
    "deepseek_v3": {"num_nextn_predict_layers", "qk_head_dim"},
    "glm4_moe": {"num_nextn_predict_layers"},
    "hunyuan_v1_dense": {"eod_token_id"},
    "hunyuan_v1_moe": {"eod_token_id"},
    "mpt": {
        "attn_config.attn_impl",
        "emb_pdrop",
        "expansion_ratio",
        "learned_pos_emb",
        "max_seq_len",
        "norm_type",
    },
    "qwen2_vl": {"vision_end_token_id", "vision_start_token_id"},
    "qwen2_5_vl": {"vision_end_token_id", "vision_start_token_id"},
    "llava": {"image_seq_length"},
    "gemma3": {"boi_token_index", "eoi_token_index", "text_config.final_logit_softcapping"},
    # Others say the same where they stand: widths, lists of layers, ties, what a file shows.
    "lfm2": {"block_ffn_dim_multiplier", "block_multiple_of"},
    "llama4_text": {"interleave_moe_layer_step", "no_rope_layer_interval"},
    "smollm3": {"no_rope_layer_interval"},
    "qwen2_moe": {"intermediate_size", "sliding_window"},
    "qwen3_next": {"intermediate_size"},
    "mistral3": {"vision_config.image_size"},
    "t5": {"feed_forward_proj", "tie_word_embeddings"},
    # These layers are the same ones in a model of so few.
    "ernie4_5_moe": {"moe_layer_end_index", "moe_layer_interval"},
    # Of heads and backbones that the case is not, and of an activation that SwiGLU replaces.
    "vit": {"encoder_stride", "pooler_act", "pooler_output_size"},
    "dinov2": {"apply_layernorm", "reshape_hidden_states", "stage_names"},
    "dinov2_with_registers": {"hidden_act"},
    "clip": {"text_config.projection_dim", "vision_config.projection_dim"},
    # Noise of training.
    "phimoe": {"input_jitter_noise"},
    "bart": {"decoder_layerdrop", "encoder_layerdrop"},
    # Its norms have the epsilon of torch, whatever is asked.
    "biogpt": {"layer_norm_eps"},
    # How fresh positions are drawn; the file holds them.
    "distilbert": {"sinusoidal_pos_embds"},
    # A token of texts, in which order a kernel adds, and how fresh weights are drawn; and labels
    # that only a sparse loss, which is refused, leaves out.
    "modernbert": {
        "cls_token_id",
        "deterministic_flash_attn",
        "initializer_cutoff_factor",
        "sparse_pred_ignore_index",
    },
}
# A fixed `alpha` takes the place of the factor; without `position_embedding_type` nothing turns.
QUIET["hunyuan_v1_dense"] |= {"rope_parameters.factor"}
QUIET["granitemoehybrid"] |= {"rope_parameters.rope_theta", "rope_parameters.rope_type"}
QUIET["llama4_text"] |= {"router_aux_loss_coef", "router_jitter_noise"}
QUIET["gemma3"] |= {"text_config.tie_word_embeddings"}
QUIET["mistral3"] |= {"text_config.tie_word_embeddings"}
for _type in ("mbart", "pegasus", "marian", "whisper"):
    QUIET[_type] = set(QUIET["bart"])
# Of fresh weights alone, or of float16 alone, or how the scan is cut.
QUIET["whisper"] |= {"apply_spec_augment", "mask_feature_length", "mask_feature_min_masks"}
QUIET["whisper"] |= {"mask_feature_prob", "mask_time_length", "mask_time_min_masks"}
QUIET["whisper"] |= {"mask_time_prob"}
QUIET["whisper"] |= {"classifier_proj_size", "median_filter_width", "use_weighted_layer_sum"}
QUIET["t5"] |= {"initializer_factor"}
QUIET["mt5"] = QUIET["umt5"] = QUIET["t5"]
QUIET["siglip"] = {"initializer_factor"}
QUIET["clip"] |= {"initializer_factor", "logit_scale_init_value"}
QUIET["clip"] |= {"text_config.initializer_factor", "vision_config.initializer_factor"}
QUIET["dinov2"] |= {"layerscale_value"}
QUIET["dinov2_with_registers"] |= QUIET["dinov2"]
QUIET["clip_text_model"] = QUIET["clip_vision_model"] = {"initializer_factor", "projection_dim"}
OF_SCANS = {"rescale_prenorm_residual", "residual_in_fp32", "time_step_floor"}
OF_SCANS |= {"time_step_max", "time_step_min"}
QUIET["mamba2"] = OF_SCANS | {"chunk_size", "time_step_rank"}
QUIET["mamba"] = OF_SCANS | {"expand", "time_step_init_scheme", "time_step_scale"}
QUIET["mamba"] |= {"use_associative_scan", "use_mambapy"}
QUIET["falcon_mamba"] = QUIET["mamba"]

BIOGPT = {
    "model_type": "biogpt",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
CASES: dict[str, list[dict]] = {"biogpt": [BIOGPT]}
for _of, _whole in (("clip", "clip"), ("siglip", "siglip")):
    _about = golden.about(_whole)["config"]
    for _side in ("text", "vision"):
        _type = f"{_of}_{_side}_model"
        CASES[_type] = [{**_about[f"{_side}_config"], "model_type": _type}]
for _config in [
    *(golden.about(name)["config"] for name in golden.cases(None)),
    *map(encoder_cases.config, encoder_cases.names()),
]:
    CASES.setdefault(_config["model_type"], []).append(_config)


def others(key, value):
    """Some values that a key does not have."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value + 1]
    if isinstance(value, float):
        return [1.5 * value + 0.25]
    if isinstance(value, str):
        return ["relu", "silu", "gelu"] if "act" in key else [f"{value}x"]
    if isinstance(value, list):
        first, last = value[:1], value[-1:]
        return [value[::-1], value[:-1] + first, value[1:] + last] if value else [[0], [1]]
    return [True, 2, 0.5, [0, 1]] if value is None else []


def built(config):
    """The abstract model; None where the config is refused."""
    try:
        return abstract_module(hf_config(config))[0]
    except ConfigError:
        return None


def with_key(config, path, value):
    """The config with another value at a path of keys."""
    key, *rest = path
    return {**config, key: with_key(config.get(key) or {}, rest, value) if rest else value}


def keys(config, above=()):
    """Each key that may mean something, as a path, with its value."""
    for key, value in config.items():
        # What stands in older keys at the top is read in today's place.
        harmless = key in HARMLESS and not (above and above[-1].startswith("rope_"))
        if harmless or key.startswith("_"):
            continue
        if isinstance(value, dict) and (key.endswith("_config") or key.startswith("rope_")):
            yield from keys(value, (*above, key))
        else:
            yield (*above, key), value


def quiet(config):
    """The keys that may have another value without any sign."""
    model, found = built(config), set()
    for path, value in keys(hf_config(config).to_dict()):
        tried = [other for other in others(path[-1], value) if other != value]
        if tried and all(built(with_key(config, path, other)) == model for other in tried):
            found.add(".".join(path))
    return found


@pytest.mark.parametrize("model_type", FILES)
def test_a_key_that_changes_nothing_is_listed(model_type):
    silent = [quiet(config) for config in CASES[model_type]]
    assert set.intersection(*silent) == QUIET.get(model_type, set())

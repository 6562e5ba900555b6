"""Every key of every config changes the abstract model, is refused, or is listed here.

`HARMLESS` in families/family.py are the keys that mean nothing to any family.
"""

from __future__ import annotations

import golden
import pytest

from flaxen.core.errors import ConfigError
from flaxen.families import FILES
from flaxen.families.config import abstract_module, hf_config
from flaxen.families.family import HARMLESS

QUIET = {
    # How a float32 result is computed, not what it is.
    "bloom": {"slow_but_exact"},
    "gpt2": {"reorder_and_upcast_attn"},
    "gpt_bigcode": {
        "attention_softmax_in_fp32",
        "num_key_value_heads",
        "scale_attention_softmax_in_fp32",
    },
    "jamba": {"use_associative_scan", "use_mamba_kernels", "use_mambapy"},
    # Transformers does not read them, or derives them from others.
    "deepseek_v2": {"head_dim", "norm_topk_prob", "qk_head_dim"},
    "deepseek_v3": {"num_nextn_predict_layers", "qk_head_dim"},
    "mpt": {"emb_pdrop", "expansion_ratio", "learned_pos_emb", "max_seq_len", "norm_type"},
    # Others say the same where they stand: widths, and lists of layers.
    "lfm2": {"block_ffn_dim_multiplier", "block_multiple_of"},
    "llama4_text": {"interleave_moe_layer_step", "no_rope_layer_interval"},
    "smollm3": {"no_rope_layer_interval"},
    "qwen2_moe": {"intermediate_size", "sliding_window"},
    "qwen3_next": {"intermediate_size"},
    # Noise of training that Transformers adds to what routers see.
    "phimoe": {"input_jitter_noise"},
}
QUIET["llama4_text"] |= {"router_jitter_noise"}
# Of fresh weights alone, or of float16 alone, or how the scan is cut.
OF_SCANS = {"rescale_prenorm_residual", "residual_in_fp32", "time_step_floor"}
OF_SCANS |= {"time_step_max", "time_step_min"}
QUIET["mamba2"] = OF_SCANS | {"chunk_size", "time_step_rank"}
QUIET["mamba"] = OF_SCANS | {"expand", "time_step_init_scheme", "time_step_scale"}
QUIET["mamba"] |= {"use_associative_scan", "use_mambapy"}
QUIET["falcon_mamba"] = QUIET["mamba"]

CASES: dict[str, list[str]] = {}
for _name in golden.cases():
    CASES.setdefault(golden.about(_name)["model_type"], []).append(_name)


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


def quiet(config):
    """The keys that may have another value without any sign."""
    model, found = built(config), set()
    for key, value in hf_config(config).to_dict().items():
        if key in HARMLESS or key.startswith("_"):
            continue
        tried = [other for other in others(key, value) if other != value]
        if tried and all(built({**config, key: other}) == model for other in tried):
            found.add(key)
    return found


@pytest.mark.parametrize("model_type", [t for t in FILES if t in CASES])
def test_a_key_that_changes_nothing_is_listed(model_type):
    silent = [quiet(golden.about(name)["config"]) for name in CASES[model_type]]
    assert set.intersection(*silent) == QUIET.get(model_type, set())

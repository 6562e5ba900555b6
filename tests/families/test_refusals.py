"""Configurations that a family cannot run as they are: it says so."""

from __future__ import annotations

import golden
import pytest

from flaxen.core.errors import ConfigError
from flaxen.families.config import abstract_module, hf_config

LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "short_mscale": 1.0,
    "long_mscale": 1.5,
}
REFUSED = {
    "deepseek_v2": [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; expected num_attention_heads=4"),
        ({"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; expected 'greedy'"),
    ],
    "phimoe": [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok is 3; this router always takes 2"),
        ({"rope_parameters": LONG}, "short_mscale=1.0 and long_mscale=1.5; expected the same"),
    ],
    "gpt_oss": [({"hidden_act": "gelu"}, "gpt_oss family does not handle hidden_act='gelu'")],
    "olmo": [
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor turns 8 of 16 channels",
        )
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "words"), [(n, *case) for n, found in REFUSED.items() for case in found]
)
def test_a_family_says_what_it_cannot_do(name, change, words):
    with pytest.raises(ConfigError, match=words):
        abstract_module(hf_config(golden.case(name).config | change))


def test_equal_factors_of_phimoe_are_one():
    change = LONG | {"long_mscale": 1.0}
    config = golden.case("phimoe").config | {"rope_parameters": change}
    rope = abstract_module(hf_config(config))[0].layers[0].self_attn.rope
    assert rope["attention_factor"] == 1.0
    assert rope["long_factor"] == rope["short_factor"]

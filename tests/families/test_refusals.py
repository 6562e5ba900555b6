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


KEYS = {"ernie4_5_moe": "moe_k", "hunyuan_v1_moe": "moe_topk"}
MIXTURES = [
    name
    for name in golden.cases()
    if KEYS.get(name, "num_experts_per_tok") in golden.about(name)["config"]
]


@pytest.mark.parametrize("name", [name for name in MIXTURES if name != "phimoe"])
def test_more_experts_of_a_token_than_there_are_are_refused(name):
    change = {KEYS.get(name, "num_experts_per_tok"): 9}
    words = r"is 9 and there are \d experts; expected from 1 to \d. Lower it"
    with pytest.raises(ConfigError, match=words):
        abstract_module(hf_config(golden.case(name).config | change))


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_group": 3}, "n_group is 3, which does not share 8 experts evenly"),
        ({"n_group": 2, "topk_group": 3}, "topk_group is 3 and n_group is 2; expected topk_group"),
        ({"n_group": 4, "topk_group": 1}, "leaves 2 to choose from"),
    ],
)
def test_groups_of_experts_that_there_cannot_be_are_refused(name, change, words):
    more = {"num_experts_per_tok": 3, "topk_method": "group_limited_greedy"}
    more = more if name == "deepseek_v2" else {"num_experts_per_tok": 3}
    with pytest.raises(ConfigError, match=words):
        abstract_module(hf_config(golden.case(name).config | more | change))


def test_groups_too_small_to_be_ranked_are_refused():
    """By the sum of their two largest scores."""
    change = {"n_group": 8, "topk_group": 2, "num_experts_per_tok": 2}
    with pytest.raises(ConfigError, match="leaves 1 experts in a group.*expected 2 or more"):
        abstract_module(hf_config(golden.case("deepseek_v3").config | change))
    abstract_module(hf_config(golden.case("deepseek_v2").config | change))

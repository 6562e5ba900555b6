"""Which attention mechanism is chosen, told before anything runs."""

from __future__ import annotations

import json

import golden

from flaxen.attention import AttentionSettings, Mask
from flaxen.families.config import abstract_module, hf_config
from flaxen.layers.attention import attention
from flaxen.layers.runtime import Runtime
from flaxen.show import attention_choices, cache_bytes_per_token

SIZES = {"embed": 32, "heads": 4, "kv_heads": 2, "head_dim": 8}
LAYERS = [attention(**SIZES, mask=Mask(window=w)) for w in (4, 4, None)]


def choices(**changes):
    call = {"queries": 16, "keys": 16, "dtype": "float32"}
    return attention_choices(LAYERS, **(call | changes))


def test_equal_calls_are_counted_together():
    assert [(row["layers"], row["call"]["mask"]["window"]) for row in choices()] == [
        (2, 4),
        (1, None),
    ]


def test_the_chosen_mechanism_comes_first_with_its_reason():
    name, reason = choices(runtime=Runtime(attention=AttentionSettings("vanilla")))[0][
        "mechanisms"
    ][0]
    assert name == "vanilla" and "as asked" in reason


def test_a_tower_for_pictures_has_no_part_in_a_decode_step():
    module = abstract_module(hf_config(golden.about("gemma3")["config"]))[0]
    causal = lambda queries: {
        row["call"]["mask"]["causal"]
        for row in attention_choices(module, queries=queries, keys=16, dtype="float32")
    }
    assert causal(16) == {True, False}
    assert causal(1) == {True}


def test_sizes_are_read_off_the_weights():
    call = choices()[0]["call"]
    assert (call["heads"], call["kv_heads"], call["head_dim"]) == (4, 2, 8)


def test_choices_can_be_written_as_json():
    json.dumps(choices())


def test_cache_size_is_keys_and_values_of_every_layer():
    assert cache_bytes_per_token(LAYERS, itemsize=2) == 3 * 2 * 2 * 8 * 2

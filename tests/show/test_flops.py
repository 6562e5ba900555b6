"""Operations of whole models against counts written down by hand, layer by layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.attention import Mask, Scene
from flaxen.attention.call import visible
from flaxen.core.errors import ConfigError
from flaxen.core.tree import is_param
from flaxen.families.config import abstract_module, hf_config
from flaxen.models.fold import folded, stack_params
from flaxen.show.chips import chip_named, chip_of, measured_peak, peak_flops
from flaxen.show.flops import decode_flops, model_flops, seen_pairs
from flaxen.tune.lora import add_lora

T, ROWS = 10, 3
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
MAMBA_LAYER = {
    "in": 2 * 32 * 64,
    "conv": 64 * 4,
    "x": 64 * (6 + 8 + 8),
    "dt": 6 * 64,
    "out": 64 * 32,
}


def abstract(**changes):
    return abstract_module(hf_config(LLAMA | changes))[0]


def forward(module):
    return model_flops(module, T, ROWS, training=False)


def by_hand(weights: int, pairs: int, widths: int, layers: int = 3, head: int = 32 * 96) -> int:
    """2 a multiply-add: weights of a layer and the head once a token, and for each pair of tokens
    that see each other, the channels of keys and values of all heads.
    """
    return 2 * ROWS * (T * (layers * weights + head) + layers * pairs * widths)


GQA = 32 * 64 + 2 * 32 * 32 + 64 * 32
CAUSAL = T * (T + 1) // 2


def test_a_llama_with_fewer_key_heads():
    expected = by_hand(GQA + 3 * 32 * 48, CAUSAL, 4 * (16 + 16))
    assert forward(abstract()) == expected


def test_a_tied_head_is_a_product_all_the_same():
    assert forward(abstract(tie_word_embeddings=True)) == forward(abstract())


def test_folded_layers_and_arrays_count_as_the_abstract_ones():
    module = abstract()
    stacked = folded(module, stack_params)
    arrays = jax.tree.map(lambda p: jnp.zeros(p.shape), stacked, is_leaf=is_param)
    assert forward(stacked) == forward(arrays) == forward(module)


def test_a_window_hides_keys():
    window = {"model_type": "mistral", "sliding_window": 4}
    pairs = 1 + 2 + 3 + 4 * (T - 3)
    assert forward(abstract(**window)) == by_hand(GQA + 3 * 32 * 48, pairs, 4 * 32)


def test_of_a_mixture_the_experts_of_a_token_count():
    mixture = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    layer = GQA + 2 * 3 * 32 * 48 + 8 * 32
    assert forward(abstract(**mixture)) == by_hand(layer, CAUSAL, 4 * 32)


def test_latent_attention_is_counted_as_it_is_expanded():
    latent = {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 12,
        "kv_lora_rank": 20,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 20,
        "first_k_dense_replace": 3,
    }
    layer = 32 * 12 + 12 * 4 * 24 + 32 * (20 + 8) + 20 * 4 * (16 + 20) + 4 * 20 * 32
    found = forward(abstract(**latent))
    assert found == by_hand(layer + 3 * 32 * 48, CAUSAL, 4 * (24 + 20))


def test_a_recurrence_fades_adds_and_reads():
    mamba = {
        "model_type": "falcon_mamba",
        "state_size": 8,
        "time_step_rank": 6,
        "conv_kernel": 4,
        "expand": 2,
    }
    module = abstract_module(
        hf_config({k: v for k, v in (LLAMA | mamba).items() if k not in DENSE})
    )
    layer = sum(MAMBA_LAYER.values())
    state = 3 * ROWS * T * 5 * 64 * 8
    assert forward(module[0]) == 2 * ROWS * T * (3 * layer + 32 * 96) + state


DENSE = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")


def test_training_has_two_more_products_for_each():
    module = abstract()
    assert model_flops(module, T, ROWS) == 3 * forward(module)


def test_frozen_weights_have_no_gradient_of_their_own():
    module = jax.tree.map(lambda p: jnp.zeros(p.shape), abstract(), is_leaf=is_param)
    adapted = add_lora(module, rank=2, targets=["q_proj"])
    weights = by_hand(GQA + 3 * 32 * 48, 0, 0)
    mixing = by_hand(0, CAUSAL, 4 * 32, head=0)
    low = 2 * ROWS * T * 3 * 2 * (32 + 64)
    assert model_flops(adapted, T, ROWS, training=False) == weights + mixing + low
    found = model_flops(adapted, T, ROWS, trained="lora")
    assert found == 2 * weights + 3 * (mixing + low)


def test_decoding_looks_at_the_whole_context():
    module = abstract()
    last = forward(module) - model_flops(module, T - 1, ROWS, training=False)
    assert decode_flops(module, T, ROWS) == last


@pytest.mark.parametrize(
    "mask",
    [
        Mask(),
        Mask(window=3),
        Mask(window=40),
        Mask(chunk=4),
        Mask(causal=False),
        Mask(causal=False, window=2),
    ],
)
@pytest.mark.parametrize("queries", [1, 5, 11])
def test_pairs_are_those_that_the_mask_shows(mask: Mask, queries: int):
    slots = jnp.arange(11)
    see = np.asarray(visible(mask, Scene(q_slots=slots, k_slots=slots)))
    assert seen_pairs(mask, queries, 11) == see.reshape(11, 11)[11 - queries :].sum()


def test_what_is_trained_is_one_of_two():
    with pytest.raises(ConfigError, match="trained is 'all'"):
        model_flops(abstract(), T, ROWS, trained="all")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "7x"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
    ],
)
def test_chips_are_known_by_what_jax_calls_them(kind: str, name: str):
    chip = chip_of(kind)
    assert chip is not None and chip.name == name
    assert peak_flops(kind) == chip.bfloat16 == chip_named(name.lower()).peak("bfloat16")


def test_the_peak_of_a_cpu_is_measured_once():
    found = peak_flops("cpu", "float32")
    assert found == peak_flops("cpu", "float32") == measured_peak("float32")
    assert found is not None and 1e8 < found < 1e14


def test_nothing_is_said_of_an_unknown_device():
    assert peak_flops("Abacus 3") is None

"""ERNIE 4.5 and its mixture: neighbouring channels turn, one key says whether there are biases."""

from __future__ import annotations

from typing import Any

from flaxen.core.tree import zeros_param
from flaxen.families.common import (
    LLAMA,
    MOE,
    balance,
    decoder,
    packed,
    rotary,
    self_attn,
    with_attention,
)
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.mlp import GatedMLP, gated_mlp
from flaxen.layers.moe import MoE, moe
from flaxen.layers.routers import CorrectedSoftmaxRouter, routed
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


def attn(c: Any, i: int) -> Attention:
    return self_attn(c, i, bias=bool(c.use_bias), rope=rotary(c, interleaved=True))


def net(c: Any, width: int) -> GatedMLP:
    return gated_mlp(c.hidden_size, width, c.hidden_act, bias=bool(c.use_bias))


@family(FAMILIES, "ernie4_5", LLAMA)
def ernie(c: Any) -> Decoder:
    return decoder(c, with_attention(attn, lambda c, i: net(c, c.intermediate_size)))


OF_MIXTURES = (
    "moe_intermediate_size",
    "moe_k",
    "moe_norm_min",
    "moe_num_experts",
    "moe_num_shared_experts",
)


def ffn(c: Any, i: int) -> MoE | GatedMLP:
    """A mixture in every `moe_layer_interval`-th layer from the start to the end index."""
    # The sizes of either kind of layer are read where there is none, too: they change nothing then.
    for key in ("intermediate_size", *OF_MIXTURES):
        c.get(key)
    inside = c.moe_layer_start_index <= i <= c.moe_layer_end_index
    if not inside or (i + 1) % c.moe_layer_interval:
        return net(c, c.intermediate_size)
    E, width = c.moe_num_experts, c.moe_intermediate_size
    gate = routed(
        CorrectedSoftmaxRouter,
        c.hidden_size,
        E,
        c.moe_k,
        e_score_correction_bias=zeros_param("1 experts", experts=E),
        least=float(c.moe_norm_min),
    )
    shared = c.moe_num_shared_experts
    return moe(gate, width, c.hidden_act, net(c, width * shared) if shared else None)


ERNIE_MOE = MOE | {
    "shared": "shared_experts",
    "gate.e_score_correction_bias": "moe_statics.e_score_correction_bias",
    "embed_tokens.bias": "lm_head.bias",
}
PACKED = packed("mlp", "gate_proj", "up_proj", "down_proj")


# What guesses a second token is not run.
@family(
    FAMILIES,
    "ernie4_5_moe",
    ERNIE_MOE,
    PACKED,
    buffers=r"rotary_emb\.inv_freq|mtp_\w+\..*",
    wide=r"gate\.weight",
)
def ernie_moe(c: Any) -> Decoder:
    bias = bool(c.use_bias)
    return decoder(c, with_attention(attn, ffn), head_bias=bias, balance=balance(c))

"""DeepSeek-V2 and V3: latent attention, and a mixture whose experts come in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flaxen.convert.relation import Join
from flaxen.core.errors import ConfigError
from flaxen.core.tree import zeros_param
from flaxen.families.common import MOE, decoder, dense, packed, with_attention
from flaxen.families.family import Family, family
from flaxen.layers.latent import Compressed, LatentAttention
from flaxen.layers.linear import Linear, linear
from flaxen.layers.mlp import GatedMLP, gated_mlp
from flaxen.layers.moe import MoE, moe
from flaxen.layers.norm import rms_norm
from flaxen.layers.rope import Rope, rope
from flaxen.layers.rope_types import yarn_gain
from flaxen.layers.routers import (
    CorrectedRouter,
    GroupedRouter,
    NormalisedCorrectedRouter,
    routed,
)
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

SPARSE = MOE | {"shared": "shared_experts"}

DEEPSEEK = SPARSE | {
    "q_proj.q_a_proj": "q_a_proj",
    "q_proj.q_a_layernorm": "q_a_layernorm",
    "q_proj.q_b_proj": "q_b_proj",
    "kv_a": Join(
        "self_attn.kv_a_proj_with_mqa",
        "{self_attn.kv_a_proj: rank | self_attn.k_rope_proj: head_dim} embed",
    ),
    "kv_b": Join(
        "self_attn.kv_b_proj",
        "(heads {self_attn.k_b_proj: head_dim | self_attn.v_b_proj: head_dim}) rank",
    ),
}

EPS = 1e-6
"""Of the norms inside latent attention, whatever the config says of others."""


def queries(c: Any, heads: dict[str, int]) -> Linear | Compressed:
    D, rank = {"embed": c.hidden_size}, c.q_lora_rank
    if rank is None:
        return linear(D, heads)
    return Compressed(
        q_a_proj=linear(D, {"rank": rank}, bias=bool(c.attention_bias)),
        q_a_layernorm=rms_norm(EPS, rank=rank),
        q_b_proj=linear({"rank": rank}, heads),
    )


def attn(c: Any, i: int, interleaved: bool = True) -> LatentAttention:
    N, D, R = c.num_attention_heads, {"embed": c.hidden_size}, {"rank": c.kv_lora_rank}
    if c.num_key_value_heads != N:
        raise ConfigError(
            f"num_key_value_heads is {c.num_key_value_heads}; expected num_attention_heads={N}, as "
            "latent attention makes keys for every head."
        )
    P, H = c.qk_nope_head_dim, c.qk_rope_head_dim
    heads = lambda size: {"heads": N, "head_dim": size}
    bias = bool(c.attention_bias)
    turn = rope(c.rope_parameters, H, c.max_position_embeddings, interleaved=interleaved)
    return LatentAttention(
        q_proj=queries(c, heads(P + H)),
        kv_a_proj=linear(D, R, bias=bias),
        k_rope_proj=linear(D, {"head_dim": H}, bias=bias),
        kv_a_layernorm=rms_norm(EPS, **R),
        k_b_proj=linear(R, heads(P)),
        v_b_proj=linear(R, heads(c.v_head_dim)),
        o_proj=linear(heads(c.v_head_dim), D, bias=bias),
        rope=turn,
        scale=(P + H) ** -0.5 * sharpness(turn),
        dropout=float(c.get("attention_dropout", 0.0)),
    )


def sharpness(turn: Rope) -> float:
    """By how much scores grow for the sake of texts longer than those of pretraining."""
    if turn.kind == "default" or not turn.get("mscale_all_dim"):
        return 1.0
    return yarn_gain(turn["factor"], turn["mscale_all_dim"]) ** 2


OF_MIXTURES = (
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "topk_group",
    "topk_method",
)


def sparse(c: Any, i: int, gate: Callable[[Any], Any]) -> MoE | GatedMLP:
    """A mixture beside an expert for all tokens, in every layer but the first ones."""
    width = c.moe_intermediate_size
    # The sizes of either kind of layer are read where there is none, too: they change nothing then.
    for key in ("intermediate_size", *OF_MIXTURES):
        c.get(key)
    if i < c.first_k_dense_replace:
        return dense(c, i)
    bias = bool(c.get("mlp_bias", False))
    shared = gated_mlp(c.hidden_size, width * c.n_shared_experts, c.hidden_act, bias=bias)
    return moe(gate(c), width, c.hidden_act, shared)


def softmax_gate(c: Any) -> GroupedRouter:
    groups = {"groups": 1, "best": 1}
    # Groups mean nothing to the greedy method.
    c.get("n_group")
    c.get("topk_group")
    if c.topk_method == "group_limited_greedy":
        groups = {"groups": c.n_group, "best": c.topk_group}
    elif c.topk_method != "greedy":
        raise ConfigError(
            f"topk_method is {c.topk_method!r}; expected 'greedy' or 'group_limited_greedy'."
        )
    sizes = c.hidden_size, c.n_routed_experts, c.num_experts_per_tok
    return routed(GroupedRouter, *sizes, **groups, scale=float(c.routed_scaling_factor))


def sigmoid_gate(c: Any) -> CorrectedRouter:
    kind = NormalisedCorrectedRouter if c.norm_topk_prob else CorrectedRouter
    return routed(
        kind,
        c.hidden_size,
        c.n_routed_experts,
        c.num_experts_per_tok,
        e_score_correction_bias=zeros_param(experts=c.n_routed_experts),
        groups=c.n_group,
        best=c.topk_group,
        scale=float(c.routed_scaling_factor),
    )


MTP = r"layers\.{}\..*".format
"""What guesses a second token is a layer after all others, in files of the large models."""

PACKED = packed("mlp", "gate_proj", "up_proj", "down_proj")


def latent_decoder(c: Any, attn: Callable[[Any, int], Any], gate: Callable[[Any], Any]) -> Decoder:
    # The config class makes both of qk_nope_head_dim and qk_rope_head_dim.
    c.get("head_dim")
    c.get("qk_head_dim")
    return decoder(c, with_attention(attn, lambda c, i: sparse(c, i, gate)))


@family(FAMILIES, "deepseek_v2", DEEPSEEK, PACKED, wide=r"gate\.weight")
def deepseek_v2(c: Any) -> Decoder:
    # Transformers does not read it: weights are as the softmax gives them.
    c.get("norm_topk_prob")
    return latent_decoder(c, attn, softmax_gate)


@family(
    FAMILIES,
    "deepseek_v3",
    DEEPSEEK,
    PACKED,
    buffers=rf"rotary_emb\.inv_freq|{MTP(61)}",
    wide=r"gate\.weight",
)
def deepseek_v3(c: Any) -> Decoder:
    # That layer is not run.
    c.get("num_nextn_predict_layers")
    interleaved = bool(c.rope_interleave)
    return latent_decoder(c, lambda c, i: attn(c, i, interleaved), sigmoid_gate)

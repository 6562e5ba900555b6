"""Qwen 3 Next: three gated delta nets to one attention with a gate, and a mixture of experts."""

from __future__ import annotations

from typing import Any

from flaxen.convert.relation import Join
from flaxen.families.common import MOE, balance, decoder, head_dim, self_attn
from flaxen.families.family import Family, family
from flaxen.families.gemma import head_norm, norm
from flaxen.families.hybrid import maybe_absent
from flaxen.families.qwen import PACKED, SHARED, experts
from flaxen.layers.block import Block
from flaxen.layers.delta import GatedDeltaNet, gated_delta_net
from flaxen.layers.gated_attention import GatedAttention, gated_attention
from flaxen.layers.mlp import gated_mlp
from flaxen.layers.moe import shared_expert
from flaxen.layers.rope import rope
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

_VALUES = "kv_heads group head_dim"

DELTA = {
    "self_attn.gate_norm": "linear_attn.norm",
    "self_attn.A_log": "linear_attn.A_log",
    "self_attn.dt_bias": "linear_attn.dt_bias",
    "self_attn.out_proj": "linear_attn.out_proj",
    "conv": Join(
        "linear_attn.conv1d",
        "{self_attn.conv_q: kv_heads head_dim | self_attn.conv_k: kv_heads head_dim"
        f" | self_attn.conv_v: {_VALUES}}} 1 kernel",
    ),
    "q": Join(
        "self_attn.q_proj",
        "(heads {self_attn.q_proj: head_dim | self_attn.gate_proj: head_dim}) embed",
    ),
}

NEXT = DELTA | {
    "qkvz": Join(
        "linear_attn.in_proj_qkvz",
        "(kv_heads {self_attn.in_q: head_dim | self_attn.in_k: head_dim"
        " | self_attn.in_v: group head_dim | self_attn.in_z: group head_dim}) embed",
    ),
    "ba": Join(
        "linear_attn.in_proj_ba", "(kv_heads {self_attn.in_b: group | self_attn.in_a: group}) embed"
    ),
}


def delta(c: Any) -> GatedDeltaNet:
    return gated_delta_net(
        embed=c.hidden_size,
        key_heads=c.linear_num_key_heads,
        value_heads=c.linear_num_value_heads,
        key_dim=c.linear_key_head_dim,
        value_dim=c.linear_value_head_dim,
        kernel=c.linear_conv_kernel_dim,
        act=c.hidden_act,
        eps=c.rms_norm_eps,
    )


def attn(c: Any, i: int) -> GatedAttention:
    """Part of each head may turn."""
    turn = rope(c.rope_parameters, head_dim(c), c.max_position_embeddings)
    return gated_attention(self_attn(c, i, rope=turn, q_norm=head_norm(c), k_norm=head_norm(c)))


def block(c: Any, i: int) -> Block:
    shared = gated_mlp(c.hidden_size, c.shared_expert_intermediate_size, c.hidden_act)
    return Block(
        self_attn=delta(c) if c.layer_types[i] == "linear_attention" else attn(c, i),
        mlp=experts(c, i, shared_expert(shared, c.hidden_size)),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
    )


@family(
    FAMILIES, "qwen3_next", MOE | SHARED | NEXT, PACKED, buffers=r"rotary_emb\.inv_freq|mtp\..*"
)
def qwen3_next(c: Any) -> Decoder:
    maybe_absent(c, "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")
    maybe_absent(c, "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts")
    maybe_absent(c, "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size")
    return decoder(c, block, norm, balance=balance(c))

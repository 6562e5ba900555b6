"""GPT-OSS: attention sinks, every second layer sliding, and a mixture of experts with biases."""

from __future__ import annotations

from typing import Any

from flaxen.convert.relation import Join
from flaxen.core.tree import ones_param, param, zeros_param
from flaxen.families.common import LLAMA, balance, decoder, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.around import WideRMSNorm
from flaxen.layers.attention import Attention
from flaxen.layers.block import Block
from flaxen.layers.moe import ClippedExperts, MoE, moe
from flaxen.layers.routers import RouterOfChosen, routed
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

STACKED = LLAMA | {
    "mlp.gate": "mlp.router",
    "gate_up": Join(
        "mlp.experts.gate_up_proj",
        "experts embed (mlp {mlp.experts.gate_proj | mlp.experts.up_proj})",
    ),
    "down": Join("mlp.experts.down_proj", "experts mlp {mlp.experts.down_proj: embed}"),
    "experts.gate_up_proj.weight": "experts.gate_up_proj",
    "experts.gate_up_proj.bias": "experts.gate_up_proj_bias",
    "experts.down_proj.weight": "experts.down_proj",
    "experts.down_proj.bias": "experts.down_proj_bias",
}
"""All experts in one tensor, `[in, out]`, in which gate and up alternate."""


def attn(c: Any, i: int) -> Attention:
    return self_attn(c, i, sinks=param(heads=c.num_attention_heads))


def experts(c: Any, i: int) -> MoE:
    E, k = c.num_local_experts, c.num_experts_per_tok
    gate = routed(RouterOfChosen, c.hidden_size, E, k, bias=zeros_param(experts=E))
    slots = {"alpha": float(c.swiglu_alpha), "limit": float(c.swiglu_limit)}
    # The activation's name is for show: Transformers does not read it.
    return moe(gate, c.intermediate_size, "silu", bias=True, kind=ClippedExperts, **slots)


def norm(c: Any) -> WideRMSNorm:
    return WideRMSNorm(weight=ones_param(embed=c.hidden_size), eps=c.rms_norm_eps)


def block(c: Any, i: int) -> Block:
    return Block(
        self_attn=attn(c, i),
        mlp=experts(c, i),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
    )


@family(FAMILIES, "gpt_oss", STACKED, not_half=r"norm\.weight")
def gpt_oss(c: Any) -> Decoder:
    return decoder(c, block, norm, balance=balance(c))

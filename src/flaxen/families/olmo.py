"""OLMo (norms without weights, clipped projections), OLMo 2 (norms after each sublayer, and over
all heads of q and k), OLMo 3 (that with windows) and OLMoE (a mixture of experts).
"""

from __future__ import annotations

from typing import Any

from flaxen.core.tree import ones_param
from flaxen.families.common import (
    LLAMA,
    MOE,
    SANDWICH,
    balance,
    decoder,
    dense,
    head_dim,
    mlp,
    packed,
    rotary,
    self_attn,
    with_attention,
)
from flaxen.families.family import Family, family
from flaxen.layers.around import Clipped, RMSNormOfHeads, WideRMSNorm
from flaxen.layers.attention import Attention
from flaxen.layers.block import Block
from flaxen.layers.moe import MoE, moe
from flaxen.layers.norm import Identity, LayerNorm
from flaxen.layers.routers import router
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

NOTHING, PLAIN = Identity(), LayerNorm(eps=1e-5)


def clipped(c: Any, norm: Any = NOTHING) -> Any:
    """After the norm, no value is larger than `clip_qkv`."""
    return norm if c.clip_qkv is None else Clipped(norm=norm, limit=float(c.clip_qkv))


def olmo_block(c: Any, i: int) -> Block:
    norms = {name: clipped(c) for name in ("q_norm", "k_norm", "v_norm")}
    return Block(
        self_attn=self_attn(c, i, **norms),
        mlp=dense(c, i),
        input_layernorm=PLAIN,
        pre_feedforward_layernorm=PLAIN,
    )


@family(FAMILIES, "olmo", LLAMA)
def olmo(c: Any) -> Decoder:
    return decoder(c, olmo_block, lambda c: PLAIN)


def norms_of_heads(c: Any, kind: type[Any]) -> tuple[Any, Any]:
    """Over all query heads, and over all key heads."""
    q, k = {"heads": c.num_attention_heads}, {"kv_heads": c.num_key_value_heads}
    made = lambda heads: kind(
        weight=ones_param(f"({' '.join(heads)} head_dim)", **heads, head_dim=head_dim(c)),
        eps=c.rms_norm_eps,
    )
    return made(q), made(k)


def wide(c: Any) -> WideRMSNorm:
    return WideRMSNorm(weight=ones_param(embed=c.hidden_size), eps=c.rms_norm_eps)


def olmo2_block(c: Any, i: int, **slots: Any) -> Block:
    q_norm, k_norm = norms_of_heads(c, WideRMSNorm)
    return Block(
        self_attn=self_attn(c, i, q_norm=q_norm, k_norm=k_norm, **slots),
        mlp=mlp(c),
        post_attention_layernorm=wide(c),
        post_feedforward_layernorm=wide(c),
    )


@family(FAMILIES, "olmo2", SANDWICH)
def olmo2(c: Any) -> Decoder:
    return decoder(c, olmo2_block, wide)


@family(FAMILIES, "olmo3", SANDWICH)
def olmo3(c: Any) -> Decoder:
    turns = lambda i: rotary(c, c.layer_types[i])
    return decoder(c, lambda c, i: olmo2_block(c, i, rope=turns(i)), wide)


def olmoe_attn(c: Any, i: int) -> Attention:
    q_norm, k_norm = (clipped(c, norm) for norm in norms_of_heads(c, RMSNormOfHeads))
    return self_attn(c, i, q_norm=q_norm, k_norm=k_norm, v_norm=clipped(c))


def experts(c: Any, i: int) -> MoE:
    k = c.num_experts_per_tok
    gate = router(c.hidden_size, c.num_experts, k, normalised=c.norm_topk_prob)
    return moe(gate, c.intermediate_size, c.hidden_act)


INSIDE = {"q_norm.norm": "q_norm", "k_norm.norm": "k_norm"}
PACKED = packed("mlp", "gate_proj", "up_proj", "down_proj")


@family(FAMILIES, "olmoe", MOE | INSIDE, PACKED)
def olmoe(c: Any) -> Decoder:
    return decoder(c, with_attention(olmoe_attn, experts), balance=balance(c))

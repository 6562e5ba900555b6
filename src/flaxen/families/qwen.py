"""Qwen 2 (biases on q, k, v), Qwen 3 (norms on the heads of q and k), and their mixtures of
experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from flaxen.attention import Mask
from flaxen.families.common import (
    LLAMA,
    MOE,
    balance,
    decoder,
    dense,
    head_rms,
    packed,
    self_attn,
    with_attention,
)
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.mlp import GatedMLP, gated_mlp
from flaxen.layers.moe import MoE, moe, shared_expert
from flaxen.layers.routers import router
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


@family(FAMILIES, "qwen2", LLAMA)
def qwen2(c: Any) -> Decoder:
    return decoder(c, with_attention(partial(self_attn, bias=True, out_bias=False)))


def normed_attn(c: Any, i: int, **slots: Any) -> Attention:
    return self_attn(c, i, q_norm=head_rms(c), k_norm=head_rms(c), **slots)


@family(FAMILIES, "qwen3", LLAMA)
def qwen3(c: Any) -> Decoder:
    return decoder(c, with_attention(normed_attn))


def experts(c: Any, i: int, shared: Any = None) -> MoE | GatedMLP:
    """A mixture in every `decoder_sparse_step`-th layer that is not listed as dense."""
    # The sizes of either kind of layer are read where there is none, too: they change nothing then.
    for key in ("intermediate_size", "moe_intermediate_size", "norm_topk_prob"):
        c.get(key)
    k = c.num_experts_per_tok
    if not c.num_experts or i in c.mlp_only_layers or (i + 1) % c.decoder_sparse_step:
        return dense(c, i)
    gate = router(c.hidden_size, c.num_experts, k, normalised=c.norm_topk_prob)
    return moe(gate, c.moe_intermediate_size, c.hidden_act, shared)


PACKED = packed("mlp", "gate_proj", "up_proj", "down_proj")

SHARED = {"shared.expert": "shared_expert", "shared.gate": "shared_expert_gate"}


@family(FAMILIES, "qwen2_moe", MOE | SHARED, PACKED)
def qwen2_moe(c: Any) -> Decoder:
    bias = {"bias": bool(c.qkv_bias), "out_bias": False}

    def ffn(c: Any, i: int) -> MoE | GatedMLP:
        mlp = gated_mlp(c.hidden_size, c.shared_expert_intermediate_size, c.hidden_act)
        return experts(c, i, shared_expert(mlp, c.hidden_size))

    return decoder(c, with_attention(partial(self_attn, **bias), ffn), balance=balance(c))


@family(FAMILIES, "qwen3_moe", MOE, PACKED)
def qwen3_moe(c: Any) -> Decoder:
    window = Mask(window=c.sliding_window or None)
    attn = partial(normed_attn, mask=window)
    return decoder(c, with_attention(attn, experts), balance=balance(c))

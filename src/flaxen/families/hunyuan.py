"""HunYuan V1, dense and as a mixture: norms on the heads of q and k after their rotation."""

from __future__ import annotations

from typing import Any

from flaxen.families.common import (
    LLAMA,
    MOE,
    decoder,
    dense,
    head_dim,
    head_rms,
    packed,
    rotary,
    self_attn,
    with_attention,
)
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.mlp import gated_mlp
from flaxen.layers.moe import MoE, moe
from flaxen.layers.placed import NormedAfterRotation
from flaxen.layers.rope import Rope, rope
from flaxen.layers.routers import router
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

HEADS = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}


def stretched(c: Any) -> Rope | None:
    """What its files call dynamic has a fixed `alpha`, by which the base grows for every length."""
    fields, size = c.rope_parameters, head_dim(c)
    if fields.get("rope_type") != "dynamic" or not fields.get("alpha"):
        return rotary(c)
    theta = fields["rope_theta"] * fields["alpha"] ** (size / (size - 2))
    return rope({"rope_theta": theta}, size, c.max_position_embeddings)


def attn(c: Any, i: int) -> Attention:
    norms = {"q_norm": head_rms(c), "k_norm": head_rms(c)}
    return NormedAfterRotation(**vars(self_attn(c, i, rope=stretched(c), **norms)))


@family(FAMILIES, "hunyuan_v1_dense", LLAMA | HEADS)
def hunyuan(c: Any) -> Decoder:
    # A token like any other.
    c.get("eod_token_id")
    return decoder(c, with_attention(attn, dense))


def experts(c: Any, i: int) -> MoE:
    k = c.moe_topk if isinstance(c.moe_topk, int) else c.moe_topk[i]
    gate = router(c.hidden_size, c.num_experts, k, normalised=True)
    shared = gated_mlp(c.hidden_size, c.intermediate_size, c.hidden_act)
    return moe(gate, c.intermediate_size, c.hidden_act, shared)


SPARSE = MOE | HEADS | {"gate": "gate.wg", "shared": "shared_mlp"}
PACKED = packed("mlp", "gate_proj", "up_proj", "down_proj")


@family(FAMILIES, "hunyuan_v1_moe", SPARSE, PACKED, wide=r"gate\.wg\.weight")
def hunyuan_moe(c: Any) -> Decoder:
    # A token like any other.
    c.get("eod_token_id")
    return decoder(c, with_attention(attn, experts))

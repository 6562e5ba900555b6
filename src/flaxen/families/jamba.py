"""Jamba: Mamba layers with norms inside, attention without positions in every n-th layer, and
mixtures of experts in every m-th.
"""

from __future__ import annotations

from typing import Any

from flaxen.families.common import MOE, balance, decoder, dense, packed, self_attn, with_attention
from flaxen.families.family import Family, family
from flaxen.families.hybrid import maybe_absent
from flaxen.families.mamba import joined
from flaxen.layers.mamba import mamba
from flaxen.layers.mlp import GatedMLP
from flaxen.layers.moe import MoE, moe
from flaxen.layers.norm import rms_norm
from flaxen.layers.routers import router
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

JAMBA = (
    MOE
    | {
        "norm": "model.final_layernorm",
        "pre_feedforward_layernorm": "pre_ff_layernorm",
        "mlp": "feed_forward",
        "gate": "router",
        "dt_norm": "dt_layernorm",
        "b_norm": "b_layernorm",
        "c_norm": "c_layernorm",
    }
    | {
        f"self_attn.{part}": f"mamba.{part}"
        for part in ("conv1d", "dt_proj", "A_log", "D", "out_proj")
    }
    | {f"self_attn.{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")}
    | joined("self_attn", "mamba")
)


def mixer(c: Any, i: int) -> Any:
    # Which program computes.
    for key in ("use_mamba_kernels", "use_mambapy", "use_associative_scan"):
        c.get(key)
    if i % c.attn_layer_period == c.attn_layer_offset:
        return self_attn(c, i, bias=False, rope=None)
    eps, state, rank = c.rms_norm_eps, c.mamba_d_state, c.mamba_dt_rank
    return mamba(
        embed=c.hidden_size,
        mlp=c.mamba_expand * c.hidden_size,
        state=state,
        rank=rank,
        kernel=c.mamba_d_conv,
        act=c.hidden_act,
        bias=c.mamba_proj_bias,
        conv_bias=c.mamba_conv_bias,
        dt_norm=rms_norm(eps, rank=rank),
        b_norm=rms_norm(eps, state=state),
        c_norm=rms_norm(eps, state=state),
    )


def ffn(c: Any, i: int) -> MoE | GatedMLP:
    if i % c.expert_layer_period != c.expert_layer_offset or c.num_experts == 1:
        return dense(c, i)
    gate = router(c.hidden_size, c.num_experts, c.num_experts_per_tok, normalised=False)
    return moe(gate, c.intermediate_size, c.hidden_act)


PACKED = packed("feed_forward", "gate_proj", "up_proj", "down_proj")


@family(FAMILIES, "jamba", JAMBA, PACKED)
def jamba(c: Any) -> Decoder:
    maybe_absent(c, "num_experts", "num_experts_per_tok", "mamba_dt_rank", "mamba_d_state")
    maybe_absent(c, "mamba_d_conv", "mamba_expand", "mamba_proj_bias", "mamba_conv_bias")
    return decoder(c, with_attention(mixer, ffn), balance=balance(c))

"""Bamba and Granite 4 (hybrid): Mamba 2 layers with attention in some."""

from __future__ import annotations

import dataclasses
from typing import Any

from flaxen.convert.relation import Join
from flaxen.families import granite
from flaxen.families.common import (
    LLAMA,
    balance,
    decoder,
    head_dim,
    rotary,
    self_attn,
    with_attention,
)
from flaxen.families.family import Family, family
from flaxen.families.hybrid import maybe_absent
from flaxen.families.mamba import joined2
from flaxen.layers.gated_norm import gate_then_norm
from flaxen.layers.mamba2 import Mamba2, mamba2
from flaxen.layers.mlp import GatedMLP, gated_mlp
from flaxen.layers.moe import MoE
from flaxen.layers.rope import rope
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

MIXER = {f"self_attn.{part}": f"mamba.{part}" for part in ("A_log", "D", "dt_bias", "out_proj")} | {
    "self_attn.gate_norm": "mamba.norm",
    **joined2("self_attn", "mamba"),
}

BAMBA = (
    LLAMA
    | {
        "norm": "model.final_layernorm",
        "pre_feedforward_layernorm": "pre_ff_layernorm",
        "mlp": "feed_forward",
    }
    | MIXER
)


MAMBA = (
    "mamba_chunk_size",
    "mamba_conv_bias",
    "mamba_d_conv",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_expand",
    "mamba_n_groups",
    "mamba_n_heads",
    "mamba_proj_bias",
    "time_step_limit",
)
"""Keys of Mamba layers; the width follows from heads, and how long pieces are changes nothing."""


def mixer(c: Any) -> Mamba2:
    norm = gate_then_norm(c.rms_norm_eps, c.mamba_n_heads, c.mamba_d_head, c.mamba_n_groups)
    return mamba2(
        norm,
        embed=c.hidden_size,
        groups=c.mamba_n_groups,
        state=c.mamba_d_state,
        kernel=c.mamba_d_conv,
        act=c.hidden_act,
        bias=c.mamba_proj_bias,
        conv_bias=c.mamba_conv_bias,
        limit=tuple(float(x) for x in c.time_step_limit),
    )


def bamba_mixer(c: Any, i: int) -> Any:
    if c.layers_block_type[i] == "linear_attention":
        return mixer(c)
    turn = rope(c.rope_parameters, head_dim(c), c.max_position_embeddings)
    return self_attn(c, i, rope=turn)


@family(FAMILIES, "bamba", BAMBA)
def bamba(c: Any) -> Decoder:
    # The kinds of layers are made of the first; the others are of training and generation.
    maybe_absent(c, "attn_layer_indices", "z_loss_coefficient", "num_logits_to_keep")
    maybe_absent(c, *MAMBA)
    return decoder(c, with_attention(bamba_mixer))


SHARED = "{mlp.shared.gate_proj: mlp | mlp.shared.up_proj: mlp} embed"

GRANITE = (
    granite.STACKED
    | {
        "mlp.shared.down_proj": "shared_mlp.output_linear",
        "mlp.down_proj": "shared_mlp.output_linear",
        "shared": Join("shared_mlp.input_linear", SHARED),
        "dense": Join("shared_mlp.input_linear", SHARED.replace(".shared", "")),
    }
    | MIXER
)


def granite_mixer(c: Any, i: int) -> Any:
    if c.layer_types[i] == "linear_attention":
        return mixer(c)
    turn = rotary(c) if c.position_embedding_type == "rope" else None
    return self_attn(c, i, rope=turn, scale=c.attention_multiplier)


def granite_ffn(c: Any, i: int) -> MoE | GatedMLP:
    """What all tokens share, beside experts if there are any."""
    shared = gated_mlp(c.hidden_size, c.shared_intermediate_size, c.hidden_act)
    if not c.num_local_experts:
        return shared
    return dataclasses.replace(granite.experts(c, i), shared=shared)


@family(FAMILIES, "granitemoehybrid", GRANITE)
def granitemoehybrid(c: Any) -> Decoder:
    # Without positions nothing turns; without experts there is no width of theirs.
    maybe_absent(c, "intermediate_size", "num_experts_per_tok", "attention_multiplier")
    maybe_absent(c, "position_embedding_type", "router_aux_loss_coef", *MAMBA)
    loss = balance(c) if c.num_local_experts else None
    return granite.decoder(c, granite_ffn, granite_mixer, balance=loss)

"""Llama 4 (text): chunks of attention, norms after the rotation, layers that do not rotate, and a
mixture whose experts are given weighed inputs.
"""

from __future__ import annotations

from typing import Any

from flaxen.attention import Mask
from flaxen.convert.relation import Join
from flaxen.families.common import LLAMA, decoder, rotary, self_attn, with_attention
from flaxen.families.family import Family, family
from flaxen.layers.around import PlainRMSNorm
from flaxen.layers.attention import Attention
from flaxen.layers.mlp import GatedMLP, gated_mlp
from flaxen.layers.moe import MoE, WeighedInputExperts, moe
from flaxen.layers.placed import NormedAfterRotation, Tempered
from flaxen.layers.routers import SigmoidRouter, routed
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

STACKED = LLAMA | {
    "mlp": "feed_forward",
    "gate": "router",
    "shared": "shared_expert",
    "gate_up": Join(
        "mlp.experts.gate_up_proj",
        "experts embed {mlp.experts.gate_proj: mlp | mlp.experts.up_proj: mlp}",
    ),
    "down": Join("mlp.experts.down_proj", "experts mlp {mlp.experts.down_proj: embed}"),
    "experts.gate_up_proj.weight": "experts.gate_up_proj",
    "experts.down_proj.weight": "experts.down_proj",
}
"""All experts in one tensor, `[in, out]`, gate before up."""


def attn(c: Any, i: int) -> Attention:
    chunk = c.attention_chunk_size
    turns = bool(c.no_rope_layers[i])
    turn = rotary(c, interleaved=True)
    made = self_attn(
        c,
        i,
        rope=turn if turns else None,
        mask=Mask(chunk=chunk if c.layer_types[i] == "chunked_attention" else None),
    )
    growth, floor = float(c.attn_scale), float(c.floor_scale)
    tuned, normed = c.attn_temperature_tuning, c.use_qk_norm
    if turns and normed:
        norm = PlainRMSNorm(eps=c.rms_norm_eps)
        return NormedAfterRotation(**{**vars(made), "q_norm": norm, "k_norm": norm})
    if not turns and tuned:
        return Tempered(**vars(made), growth=growth, floor=floor)
    return made


def ffn(c: Any, i: int) -> MoE | GatedMLP:
    net = lambda width: gated_mlp(c.hidden_size, width, c.hidden_act)
    if i not in c.moe_layers:
        return net(c.intermediate_size_mlp)
    gate = routed(SigmoidRouter, c.hidden_size, c.num_local_experts, c.num_experts_per_tok)
    width = c.intermediate_size
    return moe(gate, width, c.hidden_act, net(width), kind=WeighedInputExperts)


@family(FAMILIES, "llama4_text", STACKED)
def llama4(c: Any) -> Decoder:
    # The config class has made lists of them.
    c.get("no_rope_layer_interval")
    c.get("interleave_moe_layer_step")
    # Transformers does not read them.
    c.get("router_jitter_noise")
    c.get("router_aux_loss_coef")
    # Widths of layers that there may be none of.
    c.get("intermediate_size")
    c.get("intermediate_size_mlp")
    return decoder(c, with_attention(attn, ffn))

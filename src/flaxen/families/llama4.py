"""Llama 4 (text): chunks of attention, norms after the rotation, layers that do not rotate, and a
mixture whose experts are given weighed inputs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.attention import Mask
from flaxen.convert.relation import Join
from flaxen.core.tree import module, static
from flaxen.families.common import LLAMA, decoder, rotary, self_attn, with_attention
from flaxen.families.family import Family, family
from flaxen.layers.around import PlainRMSNorm
from flaxen.layers.attention import Attention
from flaxen.layers.context import Context
from flaxen.layers.mlp import GatedMLP, gated_mlp
from flaxen.layers.moe import MoE, WeighedInputExperts, moe
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


@module
class NormedAfterRotation(Attention):
    """Attention whose queries and keys are normed once they are turned."""

    norm: Any

    def placed(self, q: jax.Array, k: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        q, k = Attention.placed(self, q, k, ctx)
        return self.norm(q), self.norm(k)


@module
class Tempered(Attention):
    """Attention whose queries grow with their slot: by `growth` for each e-fold of `floor` slots
    (arXiv 2501.19399). Slots are counted with their padding.
    """

    growth: static[float]
    floor: static[float]

    def placed(self, q: jax.Array, k: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        first = 0 if ctx.at is None else ctx.at.slot
        slots = (first + jnp.arange(q.shape[1])).astype(jnp.float32)
        grown = jnp.log1p(jnp.floor((slots + 1) / self.floor)) * self.growth + 1
        return (q * grown[:, None, None]).astype(q.dtype), k


def attn(c: Any, i: int) -> Attention:
    chunked = c.layer_types[i] == "chunked_attention"
    turns = bool(c.no_rope_layers[i])
    turn = dataclasses.replace(rotary(c), interleaved=True)
    made = self_attn(
        c,
        i,
        rope=turn if turns else None,
        mask=Mask(chunk=c.attention_chunk_size if chunked else None),
    )
    growth, floor = float(c.attn_scale), float(c.floor_scale)
    tuned, normed = c.attn_temperature_tuning, c.use_qk_norm
    if turns and normed:
        return NormedAfterRotation(**vars(made), norm=PlainRMSNorm(eps=c.rms_norm_eps))
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
    # The config class has made lists of them; noise is for training alone.
    for key in ("no_rope_layer_interval", "interleave_moe_layer_step", "router_jitter_noise"):
        c.get(key)
    return decoder(c, with_attention(attn, ffn))

"""LFM 2: short gated convolutions, with full attention in some layers; the MoE has a mixture of
experts behind its first layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flaxen.convert.relation import Join
from flaxen.families.common import decoder, head_dim, packed, self_attn
from flaxen.families.family import Family, family
from flaxen.families.hybrid import maybe_absent
from flaxen.layers.block import Block
from flaxen.layers.gated_conv import gated_conv
from flaxen.layers.mlp import GatedMLP, gated_mlp
from flaxen.layers.moe import MoE, moe
from flaxen.layers.norm import RMSNorm, rms_norm
from flaxen.layers.sigmoid_router import sigmoid_router
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

LFM2 = {
    "layers": "model.layers",
    "embed_tokens": "model.embed_tokens",
    "norm": "model.embedding_norm",
    "input_layernorm": "operator_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.conv": "conv.conv",
    "self_attn.out_proj": "conv.out_proj",
    "in": Join(
        "conv.in_proj", "{self_attn.in_b: mlp | self_attn.in_c: mlp | self_attn.in_x: mlp} embed"
    ),
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def norm(c: Any) -> RMSNorm:
    return rms_norm(c.norm_eps, embed=c.hidden_size)


def mixer(c: Any, i: int) -> Any:
    if c.layer_types[i] == "conv":
        return gated_conv(c.hidden_size, c.conv_L_cache, bias=c.conv_bias)
    norms = (rms_norm(c.norm_eps, head_dim=head_dim(c)) for _ in range(2))
    return self_attn(c, i, bias=False, **dict(zip(("q_norm", "k_norm"), norms, strict=True)))


def width(c: Any) -> int:
    """Inner channels of a feed-forward network."""
    times, multiple = c.block_ffn_dim_multiplier, c.block_multiple_of
    if not c.block_auto_adjust_ff_dim:
        return c.intermediate_size
    inner = int(2 * c.intermediate_size / 3)
    return inner if times is None else multiple * -(-int(times * inner) // multiple)


def dense(c: Any, i: int) -> GatedMLP:
    return gated_mlp(c.hidden_size, width(c), "silu")


def block(c: Any, i: int, ffn: Callable[[Any, int], Any] = dense) -> Block:
    return Block(
        self_attn=mixer(c, i),
        mlp=ffn(c, i),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
    )


@family(FAMILIES, "lfm2", LFM2)
def lfm2(c: Any) -> Decoder:
    # The config class has made layer_types of the last one.
    maybe_absent(c, "conv_L_cache", "conv_bias", "full_attn_idxs")
    return decoder(c, block, norm)


LFM2_MOE = LFM2 | {
    "mlp.experts": "feed_forward.experts.{experts}",
    "mlp.gate": "feed_forward.gate",
    "mlp.gate.expert_bias": "feed_forward.expert_bias",
}


def experts(c: Any, i: int) -> MoE | GatedMLP:
    if i < c.num_dense_layers:
        return gated_mlp(c.hidden_size, c.intermediate_size, "silu")
    gate = sigmoid_router(
        c.hidden_size,
        c.num_experts,
        c.num_experts_per_tok,
        biased=c.use_expert_bias,
        normalised=c.norm_topk_prob,
        scale=float(c.routed_scaling_factor),
    )
    return moe(gate, c.moe_intermediate_size, "silu")


@family(FAMILIES, "lfm2_moe", LFM2_MOE, packed("feed_forward", "w1", "w3", "w2"))
def lfm2_moe(c: Any) -> Decoder:
    maybe_absent(c, "conv_L_cache", "conv_bias", "num_experts", "num_experts_per_tok")
    maybe_absent(c, "use_expert_bias", "norm_topk_prob", "routed_scaling_factor")
    maybe_absent(c, "moe_intermediate_size", "intermediate_size")
    return decoder(c, partial(block, ffn=experts), norm)

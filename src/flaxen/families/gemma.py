"""Gemma 3 (text): norms around each sublayer, sliding and full layers with ropes of their own."""

from __future__ import annotations

from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.families.common import SANDWICH, decoder, head_dim, mlp, rotary, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.block import Block
from flaxen.layers.norm import OffsetRMSNorm, offset_rms_norm
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


def norm(c: Any) -> OffsetRMSNorm:
    return offset_rms_norm(c.rms_norm_eps, embed=c.hidden_size)


def head_norm(c: Any) -> OffsetRMSNorm:
    return offset_rms_norm(c.rms_norm_eps, head_dim=head_dim(c))


def attn(c: Any, i: int) -> Attention:
    # Declared for Gemma 2's sake; Transformers runs Gemma 3 without it.
    c.get("attn_logit_softcapping")
    return self_attn(
        c,
        i,
        scale=c.query_pre_attn_scalar**-0.5,
        q_norm=head_norm(c),
        k_norm=head_norm(c),
        rope=rotary(c, c.layer_types[i]),
    )


def block(c: Any, i: int) -> Block:
    return Block(
        self_attn=attn(c, i),
        mlp=mlp(c, "hidden_activation"),
        input_layernorm=norm(c),
        post_attention_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
        post_feedforward_layernorm=norm(c),
    )


@family(FAMILIES, "gemma3_text", SANDWICH)
def gemma3(c: Any) -> Decoder:
    if c.use_bidirectional_attention:
        raise ConfigError(
            "use_bidirectional_attention is true: this Gemma 3 is an encoder, which is not "
            "supported yet."
        )
    return decoder(
        c, block, norm, scale=c.hidden_size**0.5, logit_softcap=c.final_logit_softcapping
    )

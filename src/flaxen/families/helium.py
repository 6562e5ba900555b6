"""Helium: neighbouring channels turn, and norms multiply in float32."""

from __future__ import annotations

from typing import Any

from flaxen.core.tree import ones_param
from flaxen.families.common import LLAMA, decoder, dense, rotary, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.around import WideRMSNorm
from flaxen.layers.block import Block
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


def norm(c: Any) -> WideRMSNorm:
    return WideRMSNorm(weight=ones_param(embed=c.hidden_size), eps=c.rms_norm_eps)


def block(c: Any, i: int) -> Block:
    return Block(
        self_attn=self_attn(c, i, rope=rotary(c, interleaved=True), out_bias=False),
        mlp=dense(c, i),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
    )


@family(FAMILIES, "helium", LLAMA)
def helium(c: Any) -> Decoder:
    return decoder(c, block, norm)

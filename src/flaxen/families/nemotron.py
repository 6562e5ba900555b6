"""Nemotron: 1 + weight in norms with a mean, a squared ReLU, part of each head turns."""

from __future__ import annotations

from typing import Any

from flaxen.families.common import LLAMA, decoder, partly, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.block import Block
from flaxen.layers.mlp import mlp
from flaxen.layers.norm import OffsetLayerNorm, offset_layer_norm
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


def norm(c: Any) -> OffsetLayerNorm:
    return offset_layer_norm(c.norm_eps, embed=c.hidden_size)


def block(c: Any, i: int) -> Block:
    return Block(
        self_attn=self_attn(c, i, rope=partly(c)),
        mlp=mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
    )


@family(FAMILIES, "nemotron", LLAMA)
def nemotron(c: Any) -> Decoder:
    return decoder(c, block, norm)

"""StarCoder 2: Llama with biases, norms with a mean and a plain feed-forward network."""

from __future__ import annotations

from typing import Any

from flaxen.attention import Mask
from flaxen.families.common import LLAMA, decoder, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.block import Block
from flaxen.layers.mlp import mlp
from flaxen.layers.norm import LayerNorm, layer_norm
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

STARCODER = LLAMA | {"up_proj": "c_fc", "down_proj": "c_proj"}


def norm(c: Any) -> LayerNorm:
    return layer_norm(c.norm_epsilon, embed=c.hidden_size)


def block(c: Any, i: int) -> Block:
    mask = Mask(window=c.sliding_window or None)
    return Block(
        self_attn=self_attn(c, i, bias=c.use_bias, mask=mask),
        mlp=mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.use_bias),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
        dropout=float(c.residual_dropout),
    )


@family(FAMILIES, "starcoder2", STARCODER)
def starcoder2(c: Any) -> Decoder:
    return decoder(c, block, norm, dropout=float(c.embedding_dropout))

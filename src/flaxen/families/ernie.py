"""ERNIE 4.5: neighbouring channels turn; one key says whether there are biases."""

from __future__ import annotations

import dataclasses
from typing import Any

from flaxen.families.common import LLAMA, decoder, rotary, self_attn, with_attention
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.mlp import GatedMLP, gated_mlp
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


def attn(c: Any, i: int) -> Attention:
    neighbours = dataclasses.replace(rotary(c), interleaved=True)
    return self_attn(c, i, bias=bool(c.use_bias), rope=neighbours)


def ffn(c: Any, i: int) -> GatedMLP:
    return gated_mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=bool(c.use_bias))


@family(FAMILIES, "ernie4_5", LLAMA)
def ernie(c: Any) -> Decoder:
    return decoder(c, with_attention(attn, ffn))

"""Apertus: norms on the heads of q and k, and an activation that learns."""

from __future__ import annotations

from functools import partial
from typing import Any

from flaxen.families.common import LLAMA, decoder, head_rms, self_attn, with_attention
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.mlp import MLP, mlp
from flaxen.layers.xielu import XIELUMLP, xielu_mlp
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

APERTUS = LLAMA | {
    "input_layernorm": "attention_layernorm",
    "pre_feedforward_layernorm": "feedforward_layernorm",
}


def attn(c: Any, i: int) -> Attention:
    return self_attn(c, i, q_norm=head_rms(c), k_norm=head_rms(c))


def ffn(c: Any, i: int) -> XIELUMLP | MLP:
    made = xielu_mlp if c.hidden_act == "xielu" else partial(mlp, act=c.hidden_act)
    return made(c.hidden_size, c.intermediate_size)


@family(FAMILIES, "apertus", APERTUS)
def apertus(c: Any) -> Decoder:
    return decoder(c, with_attention(attn, ffn))

"""EXAONE 4: norms after each sublayer and on the heads of q and k; beside layers with a window,
those without one do not rotate.
"""

from __future__ import annotations

from typing import Any

from flaxen.families.common import SANDWICH, decoder, head_rms, mlp, rms, rotary, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.block import Block
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


def block(c: Any, i: int) -> Block:
    # Where no layer turns, it says nothing.
    c.get("rope_parameters")
    turns = c.sliding_window is None or c.layer_types[i] == "sliding_attention"
    norms = {"q_norm": head_rms(c), "k_norm": head_rms(c)}
    return Block(
        self_attn=self_attn(c, i, rope=rotary(c) if turns else None, **norms),
        mlp=mlp(c),
        post_attention_layernorm=rms(c),
        post_feedforward_layernorm=rms(c),
    )


@family(FAMILIES, "exaone4", SANDWICH)
def exaone4(c: Any) -> Decoder:
    return decoder(c, block)

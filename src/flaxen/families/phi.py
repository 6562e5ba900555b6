"""Phi 3: Llama with q, k and v in one tensor, and gate and up in another."""

from __future__ import annotations

from typing import Any

from flaxen.attention import Mask
from flaxen.convert.relation import Join
from flaxen.families.common import LLAMA, decoder, head_dim, self_attn, with_attention
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.rope import rope
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

FUSED = LLAMA | {
    "qkv": Join(
        "self_attn.qkv_proj",
        "{self_attn.q_proj: heads head_dim | self_attn.k_proj: kv_heads head_dim"
        " | self_attn.v_proj: kv_heads head_dim} embed",
    ),
    "gate_up": Join("mlp.gate_up_proj", "{mlp.gate_proj: mlp | mlp.up_proj: mlp} embed"),
}


def attn(c: Any, i: int) -> Attention:
    """Part of each head may turn."""
    turn = rope(c.rope_parameters, head_dim(c), c.max_position_embeddings)
    return self_attn(c, i, rope=turn, mask=Mask(window=c.sliding_window or None))


@family(FAMILIES, "phi3", FUSED)
def phi3(c: Any) -> Decoder:
    # The config class has put it into the rope's parameters.
    c.get("original_max_position_embeddings")
    return decoder(c, with_attention(attn))

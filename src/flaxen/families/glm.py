"""GLM and GLM-4: neighbouring channels turn, gate and up lie in one tensor; GLM-4 has norms after
each sublayer, too.
"""

from __future__ import annotations

from typing import Any

from flaxen.convert.relation import Join
from flaxen.families.common import LLAMA, decoder, head_dim, mlp, rms, self_attn, with_attention
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.block import Block
from flaxen.layers.rope import rope
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

GLM = LLAMA | {"gate_up": Join("mlp.gate_up_proj", "{mlp.gate_proj: mlp | mlp.up_proj: mlp} embed")}


def attn(c: Any, i: int) -> Attention:
    """Part of each head may turn."""
    turn = rope(c.rope_parameters, head_dim(c), c.max_position_embeddings, interleaved=True)
    return self_attn(c, i, rope=turn, out_bias=False)


@family(FAMILIES, "glm", GLM)
def glm(c: Any) -> Decoder:
    return decoder(c, with_attention(attn))


def sandwich(c: Any, i: int) -> Block:
    return Block(
        self_attn=attn(c, i),
        mlp=mlp(c),
        input_layernorm=rms(c),
        post_attention_layernorm=rms(c),
        pre_feedforward_layernorm=rms(c),
        post_feedforward_layernorm=rms(c),
    )


GLM4 = GLM | {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


@family(FAMILIES, "glm4", GLM4)
def glm4(c: Any) -> Decoder:
    return decoder(c, sandwich)

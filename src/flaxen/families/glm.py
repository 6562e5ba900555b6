"""GLM and GLM-4: neighbouring channels turn, gate and up lie in one tensor; GLM-4 has norms after
each sublayer, too. GLM-4.5: Llama with the mixture of DeepSeek-V3.
"""

from __future__ import annotations

from typing import Any

from flaxen.convert.relation import Join
from flaxen.families.common import (
    LLAMA,
    decoder,
    head_rms,
    mlp,
    partly,
    rms,
    self_attn,
    with_attention,
)
from flaxen.families.deepseek import MTP, PACKED, SPARSE, sigmoid_gate, sparse
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.block import Block
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

GLM = LLAMA | {"gate_up": Join("mlp.gate_up_proj", "{mlp.gate_proj: mlp | mlp.up_proj: mlp} embed")}


def attn(c: Any, i: int) -> Attention:
    return self_attn(c, i, rope=partly(c, interleaved=True), out_bias=False)


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


def part_turns(c: Any, i: int) -> Attention:
    norms = {"q_norm": head_rms(c), "k_norm": head_rms(c)} if c.use_qk_norm else {}
    return self_attn(c, i, rope=partly(c), out_bias=False, **norms)


@family(
    FAMILIES,
    "glm4_moe",
    SPARSE,
    PACKED,
    buffers=rf"rotary_emb\.inv_freq|{MTP(46)}|{MTP(92)}",
    wide=r"gate\.weight",
)
def glm4_moe(c: Any) -> Decoder:
    """Files have one more layer, which guesses a second token."""
    c.get("num_nextn_predict_layers")
    return decoder(c, with_attention(part_turns, lambda c, i: sparse(c, i, sigmoid_gate)))

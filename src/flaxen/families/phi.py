"""Phi: both sublayers read one norm, everything has a bias. Phi 3: Llama with q, k and v in one
tensor, and gate and up in another.
"""

from __future__ import annotations

from typing import Any

from flaxen.attention import Mask
from flaxen.convert.relation import Join
from flaxen.families.common import LLAMA, decoder, head_dim, partly, self_attn, with_attention
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.block import ParallelBlock
from flaxen.layers.mlp import mlp
from flaxen.layers.norm import LayerNorm, layer_norm
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
    return self_attn(c, i, rope=partly(c), mask=Mask(window=c.sliding_window or None))


@family(FAMILIES, "phi3", FUSED)
def phi3(c: Any) -> Decoder:
    # The config class has put it into the rope's parameters.
    c.get("original_max_position_embeddings")
    return decoder(c, with_attention(attn))


PHI = LLAMA | {
    "norm": "model.final_layernorm",
    "embed_tokens.bias": "lm_head.bias",
    "self_attn.o_proj": "self_attn.dense",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "up_proj": "fc1",
    "down_proj": "fc2",
}


def norm(c: Any) -> LayerNorm:
    return layer_norm(c.layer_norm_eps, embed=c.hidden_size)


def biased_attn(c: Any, i: int) -> Attention:
    head = lambda: layer_norm(c.layer_norm_eps, head_dim=head_dim(c))
    norms = {"q_norm": head(), "k_norm": head()} if c.qk_layernorm else {}
    return self_attn(c, i, bias=True, rope=partly(c), **norms)


def block(c: Any, i: int) -> ParallelBlock:
    return ParallelBlock(
        self_attn=biased_attn(c, i),
        mlp=mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=True),
        input_layernorm=norm(c),
        dropout=c.resid_pdrop,
    )


@family(FAMILIES, "phi", PHI)
def phi(c: Any) -> Decoder:
    return decoder(c, block, norm, head_bias=True, dropout=c.embd_pdrop)

"""Cohere (Command R): both sublayers read one norm without bias, neighbouring channels turn
together. Cohere 2: only sliding layers turn.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from flaxen.families.common import LLAMA, decoder, head_dim, mlp, partly, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.block import ParallelBlock
from flaxen.layers.norm import LayerNorm, layer_norm
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


def norm(c: Any) -> LayerNorm:
    return layer_norm(c.layer_norm_eps, bias=False, embed=c.hidden_size)


def head_norm(c: Any, axis: str, heads: int) -> LayerNorm:
    shape: Any = {axis: heads, "head_dim": head_dim(c)}
    return layer_norm(c.layer_norm_eps, bias=False, **shape)


def attn(c: Any, i: int) -> Attention:
    norms = {
        "q_norm": head_norm(c, "heads", c.num_attention_heads),
        "k_norm": head_norm(c, "kv_heads", c.num_key_value_heads),
    }
    return self_attn(c, i, rope=partly(c, interleaved=True), **norms if c.use_qk_norm else {})


def sliding_attn(c: Any, i: int) -> Attention:
    # Where no layer slides, it says nothing.
    c.get("rope_parameters")
    turns = c.layer_types[i] == "sliding_attention" and c.sliding_window is not None
    return self_attn(c, i, rope=partly(c, interleaved=True) if turns else None)


def block(c: Any, i: int, attn: Any) -> ParallelBlock:
    return ParallelBlock(self_attn=attn(c, i), mlp=mlp(c), input_layernorm=norm(c))


@family(FAMILIES, "cohere", LLAMA)
def cohere(c: Any) -> Decoder:
    return decoder(c, partial(block, attn=attn), norm, logit_scale=c.logit_scale)


@family(FAMILIES, "cohere2", LLAMA)
def cohere2(c: Any) -> Decoder:
    return decoder(c, partial(block, attn=sliding_attn), norm, logit_scale=c.logit_scale)

"""StableLM: Llama with norms with a mean, in which part of each head turns."""

from __future__ import annotations

from typing import Any

from flaxen.families.common import LLAMA, decoder, head_dim, mlp, partly, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.block import Block, ParallelBlock
from flaxen.layers.norm import LayerNorm, layer_norm
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

STABLELM = LLAMA | {
    "q_norm": "q_layernorm.norms.{heads}",
    "k_norm": "k_layernorm.norms.{kv_heads}",
}


def norm(c: Any) -> LayerNorm:
    return layer_norm(c.layer_norm_eps, embed=c.hidden_size)


def head_norm(c: Any, **heads: int) -> LayerNorm:
    """A norm for each head, each in a tensor of its own."""
    axes = {**heads, "head_dim": head_dim(c)}
    return layer_norm(c.layer_norm_eps, bias=False, layout="head_dim", **axes)


def attn(c: Any, i: int) -> Attention:
    norms = {
        "q_norm": head_norm(c, heads=c.num_attention_heads),
        "k_norm": head_norm(c, kv_heads=c.num_key_value_heads),
    }
    bias = {"bias": c.use_qkv_bias, "out_bias": False}
    return self_attn(c, i, rope=partly(c), **bias, **norms if c.qk_layernorm else {})


def block(c: Any, i: int) -> Block | ParallelBlock:
    parts = {"self_attn": attn(c, i), "mlp": mlp(c), "input_layernorm": norm(c)}
    if c.use_parallel_residual:
        return ParallelBlock(**parts)
    return Block(pre_feedforward_layernorm=norm(c), **parts)


@family(FAMILIES, "stablelm", STABLELM)
def stablelm(c: Any) -> Decoder:
    return decoder(c, block, norm)

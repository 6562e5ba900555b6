"""GPT-NeoX: q, k and v fused by heads, both sublayers on one stream; and Persimmon."""

from __future__ import annotations

from typing import Any

from flaxen.convert.relation import Join
from flaxen.families.common import GROUPED, LLAMA, decoder, head_dim, partly, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.block import Block, ParallelBlock
from flaxen.layers.mlp import MLP, mlp
from flaxen.layers.norm import LayerNorm, layer_norm
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

NEOX = {
    "layers": "gpt_neox.layers",
    "embed_tokens": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
    "attn_layernorm": "input_layernorm",
    "mlp_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "self_attn": "attention",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "qkv": Join("attention.query_key_value", GROUPED),
}


def norm(c: Any) -> LayerNorm:
    return layer_norm(c.layer_norm_eps, embed=c.hidden_size)


def net(c: Any) -> MLP:
    return mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=True)


def block(c: Any, i: int) -> Block | ParallelBlock:
    parts = {
        "self_attn": self_attn(c, i, rope=partly(c)),
        "mlp": net(c),
        "dropout": float(c.hidden_dropout),
    }
    if c.use_parallel_residual:
        return ParallelBlock(attn_layernorm=norm(c), mlp_layernorm=norm(c), **parts)
    return Block(input_layernorm=norm(c), pre_feedforward_layernorm=norm(c), **parts)


@family(
    FAMILIES,
    "gpt_neox",
    NEOX,
    base_prefix="gpt_neox",
    buffers=r"attention\.bias|attention\.masked_bias|rotary_emb\.inv_freq",
)
def gpt_neox(c: Any) -> Decoder:
    return decoder(c, block, norm, dropout=float(c.hidden_dropout))


PERSIMMON = LLAMA | {
    "norm": "model.final_layernorm",
    "self_attn.o_proj": "self_attn.dense",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "qkv": Join("self_attn.query_key_value", GROUPED),
}


def persimmon_attn(c: Any, i: int) -> Attention:
    head = lambda: layer_norm(c.layer_norm_eps, head_dim=head_dim(c))
    norms = {"q_norm": head(), "k_norm": head()} if c.qk_layernorm else {}
    return self_attn(c, i, bias=True, rope=partly(c), **norms)


def persimmon_block(c: Any, i: int) -> Block:
    return Block(
        self_attn=persimmon_attn(c, i),
        mlp=net(c),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
    )


@family(FAMILIES, "persimmon", PERSIMMON)
def persimmon(c: Any) -> Decoder:
    return decoder(c, persimmon_block, norm)

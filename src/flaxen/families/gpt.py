"""GPT-2: learned positions, norms with a mean, and weights that lie `[in, out]` in the file."""

from __future__ import annotations

import dataclasses
from typing import Any

from flaxen.convert.relation import Join
from flaxen.families.common import decoder, head_dim
from flaxen.families.family import Family, family
from flaxen.layers.attention import attention
from flaxen.layers.block import Block
from flaxen.layers.linear import Linear, position_table
from flaxen.layers.mlp import mlp
from flaxen.layers.norm import LayerNorm, layer_norm
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

GPT2 = {
    "layers": "transformer.h",
    "embed_tokens": "transformer.wte",
    "embed_positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "pre_feedforward_layernorm": "ln_2",
    "self_attn": "attn",
    "o_proj": "c_proj",
    "up_proj": "c_fc",
    "down_proj": "c_proj",
    "qkv": Join(
        "attn.c_attn",
        "embed {self_attn.q_proj: heads head_dim | self_attn.k_proj: kv_heads head_dim"
        " | self_attn.v_proj: kv_heads head_dim}",
    ),
}


def stored(layout: str, projection: Linear) -> Linear:
    """The projection with another layout in the file."""
    weight = dataclasses.replace(projection.weight, layout=layout)
    return dataclasses.replace(projection, weight=weight)


def norm(c: Any) -> LayerNorm:
    return layer_norm(c.layer_norm_epsilon, embed=c.n_embd)


def block(c: Any, i: int) -> Block:
    scale = head_dim(c) ** -0.5 if c.scale_attn_weights else 1.0
    attn = attention(
        embed=c.n_embd,
        heads=c.n_head,
        kv_heads=c.n_head,
        head_dim=head_dim(c),
        bias=True,
        scale=scale / (i + 1) if c.scale_attn_by_inverse_layer_idx else scale,
        dropout=c.attn_pdrop,
    )
    net = mlp(c.n_embd, c.n_inner or 4 * c.n_embd, c.activation_function, bias=True)
    return Block(
        self_attn=dataclasses.replace(attn, o_proj=stored("(heads head_dim) embed", attn.o_proj)),
        mlp=dataclasses.replace(
            net,
            up_proj=stored("embed mlp", net.up_proj),
            down_proj=stored("mlp embed", net.down_proj),
        ),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
        dropout=c.resid_pdrop,
    )


@family(
    FAMILIES,
    "gpt2",
    GPT2,
    base_prefix="transformer",
    buffers=r"attn\.bias|attn\.masked_bias",
    fan_in_fan_out=True,
)
def gpt2(c: Any) -> Decoder:
    # Scores are always float32 here, which is all that this key asks for.
    c.get("reorder_and_upcast_attn")
    positions = position_table(c.n_positions, c.n_embd)
    return decoder(c, block, norm, embed_positions=positions, dropout=c.embd_pdrop)

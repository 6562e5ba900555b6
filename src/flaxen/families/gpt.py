"""GPT-2: learned positions, norms with a mean, and weights that lie `[in, out]` in the file; and
what came of it: GPT-BigCode (StarCoder), GPT-Neo, GPT-J.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flaxen.attention import Mask
from flaxen.convert.relation import Join
from flaxen.families.common import GROUPED, decoder, head_dim, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention, attention
from flaxen.layers.block import Block, ParallelBlock
from flaxen.layers.linear import Linear, position_table
from flaxen.layers.mlp import MLP, mlp
from flaxen.layers.norm import LayerNorm, layer_norm
from flaxen.layers.rope import rope
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
    return layer_norm(c.layer_norm_epsilon, embed=c.hidden_size)


def net(c: Any, inner: int | None) -> MLP:
    """A feed-forward network, four times as wide as the stream unless the config says otherwise."""
    return mlp(c.hidden_size, inner or 4 * c.hidden_size, c.activation_function, bias=True)


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
    wide = net(c, c.n_inner)
    return Block(
        self_attn=dataclasses.replace(attn, o_proj=stored("(heads head_dim) embed", attn.o_proj)),
        mlp=dataclasses.replace(
            wide,
            up_proj=stored("embed mlp", wide.up_proj),
            down_proj=stored("mlp embed", wide.down_proj),
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
    # Of another head.
    for key in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout"):
        c.get(f"summary_{key}")
    positions = position_table(c.n_positions, c.n_embd)
    return decoder(c, block, norm, embed_positions=positions, dropout=c.embd_pdrop)


BIGCODE = GPT2 | {"qkv": Join("attn.c_attn", GROUPED)}


def bigcode_block(c: Any, i: int) -> Block:
    attn = {
        "kv_heads": 1 if c.multi_query else c.n_head,
        "scale": head_dim(c) ** -0.5 if c.scale_attn_weights else 1.0,
        "dropout": c.attn_pdrop,
    }
    return Block(
        self_attn=self_attn(c, i, bias=True, rope=None, **attn),
        mlp=net(c, c.n_inner),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
        dropout=c.resid_pdrop,
    )


@family(
    FAMILIES,
    "gpt_bigcode",
    BIGCODE,
    base_prefix="transformer",
    buffers=r"transformer\.bias|attn\.bias|attn\.masked_bias",
)
def gpt_bigcode(c: Any) -> Decoder:
    # Scores are always float32 here, which is all that these ask for.
    for idle in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        c.get(idle)
    positions = position_table(c.n_positions, c.n_embd)
    return decoder(c, bigcode_block, norm, embed_positions=positions, dropout=c.embd_pdrop)


NEO = {k: v for k, v in GPT2.items() if k != "qkv"} | {
    "self_attn": "attn.attention",
    "self_attn.o_proj": "attn.attention.out_proj",
}


def neo_block(c: Any, i: int) -> Block:
    local = c.attention_layers[i] == "local"
    attn = self_attn(
        c,
        i,
        bias=False,
        out_bias=True,
        rope=None,
        scale=1.0,
        mask=Mask(window=c.window_size if local else None),
    )
    return Block(
        self_attn=attn,
        mlp=net(c, c.intermediate_size),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
        dropout=float(c.resid_dropout),
    )


@family(
    FAMILIES,
    "gpt_neo",
    NEO,
    base_prefix="transformer",
    buffers=r"attn\.attention\.bias|attn\.attention\.masked_bias",
)
def gpt_neo(c: Any) -> Decoder:
    # The config class has made a list of layers of it.
    c.get("attention_types")
    positions = position_table(c.max_position_embeddings, c.hidden_size)
    dropout = float(c.embed_dropout)
    return decoder(c, neo_block, norm, embed_positions=positions, dropout=dropout)


GPTJ = NEO | {
    "self_attn": "attn",
    "self_attn.o_proj": "attn.out_proj",
    "up_proj": "fc_in",
    "down_proj": "fc_out",
    "embed_tokens.bias": "lm_head.bias",
}


def gptj_attn(c: Any, i: int) -> Attention:
    turn = {"rope_type": "default", "rope_theta": 10000.0}
    turned = rope(turn, c.rotary_dim, c.n_positions, interleaved=True)
    return self_attn(c, i, bias=False, rope=turned, dropout=c.attn_pdrop)


def gptj_block(c: Any, i: int) -> ParallelBlock:
    return ParallelBlock(
        self_attn=gptj_attn(c, i),
        mlp=net(c, c.n_inner),
        input_layernorm=norm(c),
        dropout=c.resid_pdrop,
    )


@family(
    FAMILIES,
    "gptj",
    GPTJ,
    base_prefix="transformer",
    buffers=r"attn\.bias|attn\.masked_bias|attn\.embed_positions",
)
def gptj(c: Any) -> Decoder:
    return decoder(c, gptj_block, norm, head_bias=True, dropout=c.embd_pdrop)

"""MiniMax Text 01: lightning attention and full attention, a normed stream, and a mixture."""

from __future__ import annotations

from typing import Any

from flaxen.convert.relation import Join
from flaxen.families.common import balance, decoder, head_dim, rms
from flaxen.families.family import Family, family
from flaxen.families.llama import MIXTRAL, PACKED, experts, windowed_attn
from flaxen.layers.lightning import LightningAttention, lightning_attention
from flaxen.layers.mixer_block import WeighedBlock
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

MINIMAX = MIXTRAL | {
    "norm_of_heads": "norm",
    "qkv": Join(
        "self_attn.qkv_proj",
        "(heads {self_attn.q: head_dim | self_attn.k: head_dim | self_attn.v: head_dim}) embed",
    ),
}

DECAYS = r"rotary_emb\.inv_freq|self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)"
"""Files hold tables of how memory fades, which follow from the config."""


def lightning(c: Any, i: int) -> LightningAttention:
    # How long its pieces are.
    c.get("block_size")
    return lightning_attention(
        embed=c.hidden_size,
        heads=c.num_attention_heads,
        head_dim=head_dim(c),
        act=c.hidden_act,
        eps=1e-6,  # the reference's, which has no setting for it
        depth=i / (c.num_hidden_layers - 1 + 1e-5),
    )


def block(c: Any, i: int) -> WeighedBlock:
    linear = c.layer_types[i] == "linear_attention"
    kind = "linear" if linear else "full"
    return WeighedBlock(
        self_attn=lightning(c, i) if linear else windowed_attn(c, i),
        mlp=experts(c, i),
        input_layernorm=rms(c),
        pre_feedforward_layernorm=rms(c),
        attn=(float(c.get(f"{kind}_attn_alpha_factor")), float(c.get(f"{kind}_attn_beta_factor"))),
        ffn=(float(c.mlp_alpha_factor), float(c.mlp_beta_factor)),
    )


@family(FAMILIES, "minimax", MINIMAX, PACKED, buffers=DECAYS)
def minimax(c: Any) -> Decoder:
    return decoder(c, block, balance=balance(c))

"""Decoders with ALiBi instead of positions: Bloom and MPT."""

from __future__ import annotations

from typing import Any

from flaxen.convert.relation import Join
from flaxen.core.errors import ConfigError
from flaxen.families.common import GROUPED, decoder, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.alibi import alibi_slopes, mpt_slopes
from flaxen.layers.around import Clipped
from flaxen.layers.block import Block, NormedStreamBlock
from flaxen.layers.mlp import mlp
from flaxen.layers.norm import Identity, LayerNorm, layer_norm
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

BLOOM = {
    "layers": "transformer.h",
    "embed_tokens": "transformer.word_embeddings",
    "entry": "transformer.word_embeddings_layernorm",
    "norm": "transformer.ln_f",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "self_attn": "self_attention",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "qkv": Join("self_attention.query_key_value", GROUPED),
}


def norm(c: Any) -> LayerNorm:
    return layer_norm(c.layer_norm_epsilon, embed=c.hidden_size)


def block(c: Any, i: int) -> Block | NormedStreamBlock:
    normed = c.apply_residual_connection_post_layernorm
    slopes = alibi_slopes(c.num_attention_heads)
    return (NormedStreamBlock if normed else Block)(
        self_attn=self_attn(c, i, bias=True, rope=None, slopes=slopes),
        mlp=mlp(c.hidden_size, 4 * c.hidden_size, "gelu_new", bias=True),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
        dropout=float(c.hidden_dropout),
    )


@family(FAMILIES, "bloom", BLOOM, base_prefix="transformer")
def bloom(c: Any) -> Decoder:
    # Only in which order products are summed.
    c.get("slow_but_exact")
    return decoder(c, block, norm, entry=norm(c))


MPT = {
    "layers": "transformer.blocks",
    "embed_tokens": "transformer.wte",
    "norm": "transformer.norm_f",
    "input_layernorm": "norm_1",
    "pre_feedforward_layernorm": "norm_2",
    "self_attn": "attn",
    "o_proj": "out_proj",
    "mlp": "ffn",
    "qkv": Join(
        "attn.Wqkv",
        "{self_attn.q_proj: heads head_dim | self_attn.k_proj: kv_heads head_dim"
        " | self_attn.v_proj: kv_heads head_dim} embed",
    ),
}

ONLY = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "prefix_lm": False,
    "qk_ln": False,
}
"""Values of MPT's `attn_config` that Transformers reads or takes for granted."""


def bare_norm(c: Any) -> LayerNorm:
    return layer_norm(c.layer_norm_epsilon, bias=False, embed=c.hidden_size)


def mpt_block(c: Any, i: int) -> Block:
    how, slopes = c.attn_config, mpt_slopes(c.num_attention_heads)
    rest = {"scale": how.softmax_scale, "dropout": float(how.attn_pdrop)}
    clip = Clipped(limit=how.clip_qkv) if how.clip_qkv else Identity()
    clips = {"q_norm": clip, "k_norm": clip, "v_norm": clip}
    return Block(
        self_attn=self_attn(c, i, rope=None, slopes=slopes, **rest, **clips),
        mlp=mlp(c.hidden_size, 4 * c.hidden_size, "gelu"),
        input_layernorm=bare_norm(c),
        pre_feedforward_layernorm=bare_norm(c),
        dropout=float(how.attn_pdrop),
    )


@family(FAMILIES, "mpt", MPT, base_prefix="transformer")
def mpt(c: Any) -> Decoder:
    wrong = {k: v for k, want in ONLY.items() if (v := getattr(c.attn_config, k)) != want}
    if wrong:
        raise ConfigError(
            f"attn_config says {wrong}; this library runs MPT with "
            f"{ {k: ONLY[k] for k in wrong} } only, as its published checkpoints are."
        )
    # None of these does anything in Transformers: with ALiBi no positions are learned, the inner
    # width is always four times the outer, and dropout is attn_config's.
    for idle in ("learned_pos_emb", "expansion_ratio", "max_seq_len", "emb_pdrop", "norm_type"):
        c.get(idle)
    return decoder(c, mpt_block, bare_norm)

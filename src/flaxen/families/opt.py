"""OPT: positions that count real tokens, a narrower table of embeddings, norms before or after; and
BioGPT.
"""

from __future__ import annotations

from typing import Any

from flaxen.core.tree import param
from flaxen.families.common import decoder, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.block import Block
from flaxen.layers.linear import Chain, Embedding, TokenPositions, linear, position_table
from flaxen.layers.mlp import mlp
from flaxen.layers.norm import Identity, LayerNorm, layer_norm
from flaxen.layers.post_norm import PostNormBlock
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

OPT = {
    "layers": "model.decoder.layers",
    "embed_tokens": "model.decoder.embed_tokens",
    "embed_positions": "model.decoder.embed_positions",
    "entry": "model.decoder.project_in",
    "norm": "model.decoder.final_layer_norm",
    "norm.first": "model.decoder.final_layer_norm",
    "norm.then": "model.decoder.project_out",
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "self_attn_layer_norm",
    "pre_feedforward_layernorm": "final_layer_norm",
    "post_feedforward_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}


def norm(c: Any) -> LayerNorm:
    weighted = c.layer_norm_elementwise_affine
    return layer_norm(1e-5, embed=c.hidden_size) if weighted else LayerNorm(eps=1e-5)


def block(c: Any, i: int) -> Block | PostNormBlock:
    parts = {
        "self_attn": self_attn(c, i, bias=c.enable_bias, rope=None),
        "mlp": mlp(c.hidden_size, c.ffn_dim, c.activation_function, bias=c.enable_bias),
    }
    drop = float(c.dropout)
    if c.do_layer_norm_before:
        norms = {"input_layernorm": norm(c), "pre_feedforward_layernorm": norm(c)}
        return Block(**norms, **parts, dropout=drop)
    norms = {"post_attention_layernorm": norm(c), "post_feedforward_layernorm": norm(c)}
    return PostNormBlock(**norms, **parts, attn_dropout=drop, mlp_dropout=drop)


@family(FAMILIES, "opt", OPT)
def opt(c: Any) -> Decoder:
    last = c.do_layer_norm_before and not c.get("_remove_final_layer_norm", False)
    out = norm(c) if last else Identity()
    positions = position_table(c.max_position_embeddings, c.hidden_size, 2, TokenPositions)
    if c.word_embed_proj_dim == c.hidden_size:
        return decoder(c, block, lambda c: out, embed_positions=positions)
    narrow, wide = {"token_embed": c.word_embed_proj_dim}, {"embed": c.hidden_size}
    V = {"vocab": c.vocab_size}
    return decoder(
        c,
        block,
        lambda c: Chain(first=out, then=linear(wide, narrow)),
        embed_tokens=Embedding(weight=param(**V, **narrow)),
        entry=linear(narrow, wide),
        embed_positions=positions,
        lm_head=None if c.tie_word_embeddings else linear(narrow, V),
    )


BIOGPT = {k: v for k, v in OPT.items() if "." in k and not k.startswith("norm")} | {
    "layers": "biogpt.layers",
    "embed_tokens": "biogpt.embed_tokens",
    "embed_positions": "biogpt.embed_positions",
    "norm": "biogpt.layer_norm",
    "lm_head": "output_projection",
    "input_layernorm": "self_attn_layer_norm",
    "pre_feedforward_layernorm": "final_layer_norm",
}


def biogpt_norm(c: Any) -> LayerNorm:
    # Transformers takes the default of torch.
    c.get("layer_norm_eps")
    return layer_norm(1e-5, embed=c.hidden_size)


def biogpt_block(c: Any, i: int) -> Block:
    dropout = float(c.attention_probs_dropout_prob)
    return Block(
        self_attn=self_attn(c, i, bias=True, rope=None, dropout=dropout),
        mlp=mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=True),
        input_layernorm=biogpt_norm(c),
        pre_feedforward_layernorm=biogpt_norm(c),
        dropout=float(c.hidden_dropout_prob),
    )


@family(FAMILIES, "biogpt", BIOGPT, base_prefix="biogpt")
def biogpt(c: Any) -> Decoder:
    return decoder(
        c,
        biogpt_block,
        biogpt_norm,
        scale=c.hidden_size**0.5 if c.scale_embedding else 1.0,
        embed_positions=position_table(c.max_position_embeddings, c.hidden_size, 2),
        dropout=float(c.hidden_dropout_prob),
    )

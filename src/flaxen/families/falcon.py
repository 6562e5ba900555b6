"""Falcon in its three forms: 7B (one key head for all, one norm for both sublayers), 40B (key heads
for groups, a norm for each), RW (as many key heads, one sublayer after the other, ALiBi).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from flaxen.convert.relation import Join
from flaxen.core.errors import ConfigError
from flaxen.families.common import GROUPED, decoder, head_dim, partly, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.alibi import alibi_slopes
from flaxen.layers.attention import Attention
from flaxen.layers.block import Block, ParallelBlock
from flaxen.layers.mlp import mlp
from flaxen.layers.norm import LayerNorm, layer_norm
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}

FALCON = {
    "layers": "transformer.h",
    "embed_tokens": "transformer.word_embeddings",
    "norm": "transformer.ln_f",
    "attn_layernorm": "ln_attn",
    "mlp_layernorm": "ln_mlp",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "self_attn": "self_attention",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "qkv": Join("self_attention.query_key_value", GROUPED),
}


def norm(c: Any) -> LayerNorm:
    return layer_norm(c.layer_norm_epsilon, embed=c.hidden_size)


def slopes(c: Any) -> tuple[float, ...]:
    """Falcon rounds them to bfloat16, and scales them together with the scores."""
    rounded = np.asarray(alibi_slopes(c.num_attention_heads), ml_dtypes.bfloat16)
    return tuple((rounded.astype(np.float64) * head_dim(c) ** -0.5).tolist())


def attn(c: Any, i: int) -> Attention:
    # Either says nothing in one of the forms.
    kv_heads, _ = c.num_kv_heads, c.get("rope_parameters")
    one_for_all = c.multi_query and not c.new_decoder_architecture
    where = {"rope": None, "slopes": slopes(c)} if c.alibi else {"rope": partly(c)}
    heads = {"kv_heads": 1 if one_for_all else kv_heads}
    return self_attn(c, i, bias=bool(c.bias), **heads, **where)


def block(c: Any, i: int) -> Block | ParallelBlock:
    parts = {
        "self_attn": attn(c, i),
        "mlp": mlp(c.hidden_size, c.ffn_hidden_size, c.activation, bias=bool(c.bias)),
        "dropout": float(c.hidden_dropout),
    }
    if not c.parallel_attn:
        return Block(input_layernorm=norm(c), pre_feedforward_layernorm=norm(c), **parts)
    if norms(c) == 1:
        return ParallelBlock(input_layernorm=norm(c), **parts)
    return ParallelBlock(attn_layernorm=norm(c), mlp_layernorm=norm(c), **parts)


def norms(c: Any) -> int:
    """How many norms a layer with parallel sublayers has.

    Raises:
        ConfigError: an arrangement that Transformers does not run either.
    """
    new, found = bool(c.new_decoder_architecture), c.num_ln_in_parallel_attn
    count = (2 if new else 1) if found is None else found
    if count not in ((1, 2) if new else (1,)) or (new and not c.parallel_attn):
        raise ConfigError(
            f"This falcon config says new_decoder_architecture={new}, parallel_attn="
            f"{c.parallel_attn} and num_ln_in_parallel_attn={found}. The new architecture needs "
            "parallel_attn and 1 or 2 norms; the old one has 1 or null."
        )
    return count


@family(FAMILIES, "falcon", FALCON, base_prefix="transformer")
def falcon(c: Any) -> Decoder:
    norms(c)
    return decoder(c, block, norm)

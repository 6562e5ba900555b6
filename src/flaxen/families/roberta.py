"""RoBERTa, XLM-RoBERTa, and MPNet, which adds a bias for distances to every score."""

from __future__ import annotations

from functools import partial
from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.families.bert import bert_layers
from flaxen.families.encoders import (
    HEADS,
    asked_head,
    block,
    encoder,
    masked_lm_gelu,
    of_first,
    self_attn,
    types,
)
from flaxen.families.family import Family, family
from flaxen.layers.inner_dropout import as_kind
from flaxen.layers.relative_bias import BiasedAttention, relative_bias
from flaxen.models.encoder import Encoder
from flaxen.models.encoder_positions import CountAfter

FAMILIES: dict[str, Family] = {}

OWN_HEADS = {
    "head.transform.dense": "lm_head.dense",
    "head.transform.norm": "lm_head.layer_norm",
    "head.decoder": "lm_head.decoder",
    "head.bias": "lm_head.bias",
    "head.unused": "lm_head.bias",
    "head.hidden.dense": "classifier.dense",
    "head.out_proj": "classifier.out_proj",
}

ROBERTA_HEADS = HEADS | {
    "ForMaskedLM": masked_lm_gelu,
    "ForSequenceClassification": of_first,
}


def roberta_spare(prefix: str) -> str:
    return rf"({prefix}\.)?pooler\.|lm_head\.|classifier\.|qa_outputs\."


ROBERTA, SPARE = bert_layers("roberta") | OWN_HEADS, roberta_spare("roberta")


@family(FAMILIES, "roberta", ROBERTA, base_prefix="roberta", spare=SPARE)
def roberta(c: Any, prefix: str = "Roberta") -> Encoder:
    head = asked_head(c, prefix, ROBERTA_HEADS, ["classifier_dropout"])
    return encoder(c, head, embed_types=types(c), count=CountAfter(c.pad_token_id))


@family(FAMILIES, "xlm-roberta", ROBERTA, base_prefix="roberta", spare=SPARE)
def xlm_roberta(c: Any) -> Encoder:
    return roberta(c, "XLMRoberta")


MPNET = (
    bert_layers("mpnet")
    | OWN_HEADS
    | {
        "self_attn.q_proj": "attention.attn.q",
        "self_attn.k_proj": "attention.attn.k",
        "self_attn.v_proj": "attention.attn.v",
        "self_attn.o_proj": "attention.attn.o",
        "post_attention_layernorm": "attention.LayerNorm",
        "position_bias": "mpnet.encoder.relative_attention_bias",
    }
)

RANGES = 32
"""MPNet's code tells so many ranges of distances apart, whatever the size of its table."""

PAD = 1
"""Its positions go by this token, whatever `pad_token_id` says."""


def biased_attn(c: Any, i: int) -> BiasedAttention:
    return as_kind(BiasedAttention, self_attn(c, i))


@family(FAMILIES, "mpnet", MPNET, base_prefix="mpnet", spare=roberta_spare("mpnet"))
def mpnet(c: Any) -> Encoder:
    buckets = c.relative_attention_num_buckets
    if buckets < RANGES:
        raise ConfigError(
            f"relative_attention_num_buckets is {buckets}; MPNet looks up {RANGES} rows of it."
        )
    head = asked_head(c, "MPNet", ROBERTA_HEADS)
    bias = relative_bias(buckets, c.num_attention_heads, RANGES)
    with_bias = partial(block, attn=biased_attn)
    return encoder(c, head, with_bias, position_bias=bias, count=CountAfter(PAD), pad=PAD)

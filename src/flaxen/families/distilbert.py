"""DistilBERT: BERT without token types, with names and heads of its own."""

from __future__ import annotations

from typing import Any

from flaxen.core.tree import zeros_param
from flaxen.families.bert import bert_layers
from flaxen.families.encoders import (
    Heads,
    asked_head,
    both_ways,
    choices,
    dense,
    encoder,
    sequence,
    span,
    tokens,
)
from flaxen.families.family import Family, family
from flaxen.layers.linear import linear
from flaxen.layers.mlp import mlp
from flaxen.layers.norm import layer_norm
from flaxen.layers.post_norm import PostNormBlock
from flaxen.models.encoder import Encoder
from flaxen.models.heads import Bare, Head, MaskedLMHead, Transform

FAMILIES: dict[str, Family] = {}

DISTILBERT = bert_layers("distilbert") | {
    "layers": "distilbert.transformer.layer",
    "self_attn.q_proj": "attention.q_lin",
    "self_attn.k_proj": "attention.k_lin",
    "self_attn.v_proj": "attention.v_lin",
    "self_attn.o_proj": "attention.out_lin",
    "post_attention_layernorm": "sa_layer_norm",
    "mlp.up_proj": "ffn.lin1",
    "mlp.down_proj": "ffn.lin2",
    "post_feedforward_layernorm": "output_layer_norm",
    "head.transform.dense": "vocab_transform",
    "head.transform.norm": "vocab_layer_norm",
    "head.decoder": "vocab_projector",
    "head.bias": "vocab_projector.bias",
    "head.hidden.dense": "pre_classifier",
    "head.out_proj": "classifier",
    "head.pooler.dense": "pre_classifier",
}

EPS = 1e-12


def block(c: Any, i: int) -> PostNormBlock:
    return PostNormBlock(
        self_attn=both_ways(c, dropout=float(c.attention_dropout)),
        mlp=mlp(c.dim, c.hidden_dim, c.activation, bias=True),
        post_attention_layernorm=layer_norm(EPS, embed=c.dim),
        post_feedforward_layernorm=layer_norm(EPS, embed=c.dim),
        mlp_dropout=float(c.dropout),
    )


def masked_lm(c: Any) -> Head:
    V = {"vocab": c.vocab_size}
    return MaskedLMHead(
        transform=dense(c, c.activation, layer_norm(EPS, features=c.dim)),
        decoder=None if c.tie_word_embeddings else linear({"features": c.dim}, V),
        bias=zeros_param(**V),
    )


def hidden(c: Any) -> Transform:
    return dense(c, "relu")


DISTILBERT_HEADS: Heads = {
    "Model": lambda c: Bare(),
    "ForMaskedLM": masked_lm,
    "ForSequenceClassification": lambda c: sequence(c, hidden(c), float(c.seq_classif_dropout)),
    "ForMultipleChoice": lambda c: choices(c, hidden(c), float(c.seq_classif_dropout)),
    "ForTokenClassification": lambda c: tokens(c, float(c.dropout)),
    "ForQuestionAnswering": lambda c: span(c, float(c.qa_dropout)),
}


@family(
    FAMILIES,
    "distilbert",
    DISTILBERT,
    base_prefix="distilbert",
    spare=r"vocab_\w+\.|(pre_)?classifier\.|qa_outputs\.",
)
def distilbert(c: Any) -> Encoder:
    # How fresh positions would be drawn; the file holds them.
    c.get("sinusoidal_pos_embds")
    others = ["seq_classif_dropout", "qa_dropout"]
    head = asked_head(c, "DistilBert", DISTILBERT_HEADS, others)
    over, rate = layer_norm(EPS, embed=c.dim), float(c.dropout)
    return encoder(c, head, block, embed_norm=over, dropout=rate)

"""ModernBERT: every few layers see all tokens, the others their neighbours; norms come first."""

from __future__ import annotations

from typing import Any

from flaxen.attention import Mask
from flaxen.convert.relation import Join
from flaxen.core.errors import ConfigError
from flaxen.core.tree import zeros_param
from flaxen.families.common import rotary
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
from flaxen.layers.block import Block
from flaxen.layers.inner_dropout import DroppingAttention, DroppingGatedMLP, as_kind
from flaxen.layers.linear import linear
from flaxen.layers.mlp import gated_mlp
from flaxen.layers.norm import Identity, LayerNorm, layer_norm
from flaxen.layers.pooling import FirstSlot, FirstToken, Mean
from flaxen.models.encoder import Encoder
from flaxen.models.heads import Bare, Head, MaskedLMHead, Transform

FAMILIES: dict[str, Family] = {}

MODERNBERT = {
    "embed_tokens": "model.embeddings.tok_embeddings",
    "embed_norm": "model.embeddings.norm",
    "layers": "model.layers",
    "norm": "model.final_norm",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "self_attn.o_proj": "attn.Wo",
    "qkv": Join(
        "attn.Wqkv",
        "{self_attn.q_proj: heads head_dim | self_attn.k_proj: kv_heads head_dim"
        " | self_attn.v_proj: kv_heads head_dim} embed",
    ),
    "gate_up": Join("mlp.Wi", "{mlp.gate_proj: mlp | mlp.up_proj: mlp} embed"),
    "mlp.down_proj": "mlp.Wo",
    **{
        f"head.{part}.{ours}": f"head.{ours}"
        for part in ("transform", "hidden", "pooler")
        for ours in ("dense", "norm")
    },
    "head.decoder": "decoder",
    "head.bias": "decoder.bias",
    **{f"head.{part}": "classifier" for part in ("out_proj", "classifier", "qa_outputs", "choice")},
}


def norm(c: Any, axis: str = "embed") -> LayerNorm:
    return layer_norm(c.norm_eps, bias=bool(c.norm_bias), **{axis: c.hidden_size})


def block(c: Any, i: int) -> Block:
    kind, rate = c.layer_types[i], float(c.attention_dropout)
    near = c.local_attention // 2  # read in layers that see all, too: it changes nothing there
    window = near if kind == "sliding_attention" else None
    attn = both_ways(
        c,
        bias=bool(c.attention_bias),
        rope=rotary(c, kind),
        mask=Mask(causal=False, window=window),
        dropout=rate,
    )
    net = gated_mlp(c.hidden_size, c.intermediate_size, c.hidden_activation, bias=bool(c.mlp_bias))
    return Block(
        self_attn=as_kind(DroppingAttention, attn, out_dropout=rate),
        mlp=as_kind(DroppingGatedMLP, net, dropout=float(c.mlp_dropout)),
        # The embeddings are normalised already.
        input_layernorm=norm(c) if i else Identity(),
        pre_feedforward_layernorm=norm(c),
    )


def transform(c: Any) -> Transform:
    over = norm(c, "features")
    return dense(c, c.classifier_activation, over, bias=bool(c.classifier_bias))


def masked_lm(c: Any) -> Head:
    V = {"vocab": c.vocab_size}
    return MaskedLMHead(
        transform=transform(c),
        decoder=None if c.tie_word_embeddings else linear({"features": c.hidden_size}, V),
        bias=zeros_param(**V) if c.decoder_bias else None,
    )


def rate(c: Any) -> float:
    return float(c.classifier_dropout)


def pool(c: Any, first: Any) -> Any:
    kinds = {"cls": first, "mean": Mean()}
    if c.classifier_pooling not in kinds:
        raise ConfigError(f"classifier_pooling is {c.classifier_pooling!r}; expected cls or mean.")
    return kinds[c.classifier_pooling]


MODERNBERT_HEADS: Heads = {
    "Model": lambda c: Bare(),
    "ForMaskedLM": masked_lm,
    "ForSequenceClassification": lambda c: sequence(
        c, transform(c), rate(c), pool=pool(c, FirstSlot())
    ),
    "ForMultipleChoice": lambda c: choices(c, transform(c), rate(c), pool(c, FirstToken())),
    "ForTokenClassification": lambda c: tokens(c, rate(c), transform(c)),
    "ForQuestionAnswering": lambda c: span(c, rate(c), transform(c)),
}

OTHERS = (
    *("decoder_bias", "classifier_pooling", "classifier_dropout", "classifier_bias"),
    "classifier_activation",
)


@family(FAMILIES, "modernbert", MODERNBERT, spare=r"head\.|decoder\.|classifier\.")
def modernbert(c: Any) -> Encoder:
    # How fresh weights are drawn, in which order a kernel adds, a special token, and an epsilon
    # that stands in files beside `norm_eps`: none changes a number.
    for key in ("initializer_cutoff_factor", "deterministic_flash_attn"):
        c.get(key)
    for key in ("cls_token_id", "layer_norm_eps"):
        c.get(key)
    if c.get("sparse_prediction"):
        raise ConfigError(
            "sparse_prediction is true: scores of masked tokens alone, which is not supported. Set "
            "it to false: losses are the same."
        )
    c.get("sparse_pred_ignore_index")  # of these alone
    head = asked_head(c, "ModernBert", MODERNBERT_HEADS, OTHERS)
    slots = {"embed_norm": norm(c), "norm": norm(c), "embed_positions": None}
    return encoder(c, head, block, **slots, dropout=float(c.embedding_dropout))

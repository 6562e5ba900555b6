"""T5 and its relatives: no positions but a bias of scores, RMS norms, no biases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flaxen.attention import Mask
from flaxen.core.errors import ConfigError
from flaxen.core.tree import param
from flaxen.families.family import Family, family
from flaxen.families.seq2seq import alone, asked, shifted
from flaxen.layers.attention import attention
from flaxen.layers.block import Block
from flaxen.layers.cross_attention import cross_attention
from flaxen.layers.cross_block import CrossBlock
from flaxen.layers.inner_dropout import DroppingMLP, GatedFeedForward, as_kind, gated_feed_forward
from flaxen.layers.linear import embedding
from flaxen.layers.mlp import mlp
from flaxen.layers.norm import RMSNorm, rms_norm
from flaxen.layers.relative_bias import (
    BiasedAttention,
    OwnBiasAttention,
    PastBias,
    RelativeBias,
)
from flaxen.models.encoder_alone import EncoderAlone
from flaxen.models.encoder_decoder import EncoderDecoder
from flaxen.models.tower import TextEncoder

FAMILIES: dict[str, Family] = {}

BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias"

T5 = {
    "embed_tokens": "shared",
    "encoder.embed_tokens": "encoder.embed_tokens",
    "decoder.embed_tokens": "decoder.embed_tokens",
    "encoder.position_bias": f"encoder.{BIAS}",
    "position_bias": f"decoder.{BIAS}",
    "encoder.norm": "encoder.final_layer_norm",
    "norm": "decoder.final_layer_norm",
    "encoder.layers.*.self_attn": "encoder.block.*.layer.0.SelfAttention",
    "encoder.layers.*.input_layernorm": "encoder.block.*.layer.0.layer_norm",
    "encoder.layers.*.mlp": "encoder.block.*.layer.1.DenseReluDense",
    "encoder.layers.*.pre_feedforward_layernorm": "encoder.block.*.layer.1.layer_norm",
    "layers.*.self_attn": "decoder.block.*.layer.0.SelfAttention",
    "layers.*.input_layernorm": "decoder.block.*.layer.0.layer_norm",
    "layers.*.cross_attn": "decoder.block.*.layer.1.EncDecAttention",
    "layers.*.cross_attention_layernorm": "decoder.block.*.layer.1.layer_norm",
    "layers.*.mlp": "decoder.block.*.layer.2.DenseReluDense",
    "layers.*.pre_feedforward_layernorm": "decoder.block.*.layer.2.layer_norm",
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "wi_0",
    "linear_proj": "wi_1",
    "up_proj": "wi",
    "down_proj": "wo",
}

SPARE = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\."
"""Older files hold it; nothing ever looked at it."""


def rms(c: Any) -> RMSNorm:
    return rms_norm(c.layer_norm_epsilon, embed=c.d_model)


def sizes(c: Any) -> dict[str, Any]:
    """Scores are not scaled: the weights are drawn so that they need not be."""
    return {
        "embed": c.d_model,
        "heads": c.num_heads,
        "kv_heads": c.num_heads,
        "head_dim": c.d_kv,
        "scale": 1.0,
        "dropout": float(c.dropout_rate),
    }


def biased_attn(c: Any, causal: bool) -> BiasedAttention:
    return as_kind(BiasedAttention, attention(**sizes(c), mask=Mask(causal=causal)))


def ffn(c: Any) -> DroppingMLP | GatedFeedForward:
    c.get("feed_forward_proj")  # the config class has made the next two keys of it
    rate, width = float(c.dropout_rate), (c.d_model, c.d_ff, c.dense_act_fn)
    if c.is_gated_act:
        return gated_feed_forward(*width, rate)
    return as_kind(DroppingMLP, mlp(*width), dropout=rate)


Attn = Callable[[Any, bool], Any]


def slots(c: Any, causal: bool, attn: Attn) -> dict[str, Any]:
    """What layers of both sides have."""
    return {
        "self_attn": attn(c, causal),
        "mlp": ffn(c),
        "input_layernorm": rms(c),
        "pre_feedforward_layernorm": rms(c),
        "dropout": float(c.dropout_rate),
    }


def decoder_block(c: Any, attn: Attn) -> CrossBlock:
    cross = cross_attention(**sizes(c))
    return CrossBlock(**slots(c, True, attn), cross_attn=cross, cross_attention_layernorm=rms(c))


def bias(c: Any, kind: type[Any]) -> Any:
    ranges = c.relative_attention_num_buckets
    weight = param(buckets=ranges, heads=c.num_heads)
    return kind(weight=weight, ranges=ranges, reach=c.relative_attention_max_distance)


def shared_bias(c: Any, causal: bool) -> dict[str, Any]:
    """One table for all layers of a side."""
    return {"position_bias": bias(c, PastBias if causal else RelativeBias)}


def nothing(*_: Any) -> dict[str, Any]:
    return {}


def head(c: Any) -> dict[str, Any]:
    """Tied, whatever a config says; the next key is made of what a file says of it."""
    return {"head_scale": c.d_model**-0.5 if c.scale_decoder_outputs else 1.0}


KINDS: dict[str, Any] = {"base_prefix": "transformer", "spare": SPARE}


@family(FAMILIES, "t5", T5, **KINDS)
def t5(
    c: Any,
    prefix: str = "T5",
    attn: Attn = biased_attn,
    around: Callable[[Any, bool], dict[str, Any]] = shared_bias,
    head: Callable[[Any], dict[str, Any]] = head,
) -> EncoderDecoder | EncoderAlone:
    for key in ("tie_word_embeddings", "classifier_dropout", "initializer_factor"):
        c.get(key)  # of other heads, of fresh weights; `head` says what becomes of the first
    if c.is_decoder:
        raise ConfigError("is_decoder=True asks for a T5 decoder alone, which is not handled here.")
    rate = float(c.dropout_rate)
    ends = {"norm": rms(c), "dropout": rate, "last_dropout": rate}
    inner = [Block(**slots(c, False, attn)) for _ in range(c.num_layers)]
    encoder = TextEncoder(layers=inner, **around(c, False), **ends)
    table = embedding(c.vocab_size, c.d_model)
    if alone(c, prefix):
        return EncoderAlone(embed_tokens=table, encoder=encoder)
    return asked(c, prefix, partial(head, c), older=["WithLMHeadModel"])(
        embed_tokens=table,
        encoder=encoder,
        layers=[decoder_block(c, attn) for _ in range(c.num_decoder_layers)],
        shift=shifted(c),
        **around(c, True),
        **ends,
    )


@family(FAMILIES, "mt5", T5, **KINDS)
def mt5(c: Any) -> EncoderDecoder | EncoderAlone:
    return t5(c, "MT5", head=nothing)


def own_bias(c: Any, causal: bool) -> OwnBiasAttention:
    """umT5's: each layer has a table of its own."""
    table = bias(c, PastBias if causal else RelativeBias)
    plain = attention(**sizes(c), mask=Mask(causal=causal))
    return as_kind(OwnBiasAttention, plain, position_bias=table)


OWN = {ours: name for ours, name in T5.items() if not ours.endswith("position_bias")}
OWN |= {"position_bias": "relative_attention_bias"}


@family(FAMILIES, "umt5", OWN, **KINDS)
def umt5(c: Any) -> EncoderDecoder | EncoderAlone:
    return t5(c, "UMT5", own_bias, nothing)

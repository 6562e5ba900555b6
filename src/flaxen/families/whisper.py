"""Whisper: an encoder of audio, learned positions, norms before each sublayer, keys unbiased."""

from __future__ import annotations

import dataclasses
from typing import Any

from flaxen.attention import Mask
from flaxen.core.errors import ConfigError
from flaxen.families.family import Family, family
from flaxen.families.seq2seq import (
    NAMES,
    asked,
    attn,
    decoder_block,
    encoder_block,
    layers,
    norm,
    shifted,
)
from flaxen.layers.attention import Attention
from flaxen.layers.cross_attention import CrossAttention, cross_attention
from flaxen.layers.linear import embedding, linear, position_table
from flaxen.layers.strided_conv import conv
from flaxen.models.audio import AudioEncoder
from flaxen.models.encoder_decoder import EncoderDecoder

FAMILIES: dict[str, Family] = {}

WHISPER = NAMES | {"embed_tokens": "model.decoder.embed_tokens", "lm_head": "proj_out"}


def keys_unbiased(part: Any) -> Any:
    """Keys have no bias, which no softmax would see."""
    return dataclasses.replace(part, k_proj=dataclasses.replace(part.k_proj, bias=None))


def seeing(c: Any, side: str) -> Attention:
    return keys_unbiased(attn(c, side, mask=Mask(causal=side == "decoder")))


def crossing(c: Any) -> CrossAttention:
    return keys_unbiased(attn(c, "decoder", cross_attention))


UNUSED = (
    "apply_spec_augment",
    "mask_time_prob",
    "mask_time_length",
    "mask_time_min_masks",
    "mask_feature_prob",
    "mask_feature_length",
    "mask_feature_min_masks",
    "median_filter_width",
    "use_weighted_layer_sum",
    "classifier_proj_size",
    "suppress_tokens",
    "begin_suppress_tokens",
)
"""Of augmentation in training, timestamps of words, and a classifier; the last two are read when
it generates.
"""


@family(FAMILIES, "whisper", WHISPER, spare=r"projector\.|classifier\.|layer_weights")
def whisper(c: Any) -> EncoderDecoder:
    for key in UNUSED:
        c.get(key)
    if c.scale_embedding:
        raise ConfigError("scale_embedding is true, which Transformers' Whisper does not follow.")
    width = c.d_model
    tied = c.tie_word_embeddings
    own = {} if tied else {"lm_head": linear({"embed": width}, {"vocab": c.vocab_size})}
    encoder = AudioEncoder(
        conv1=conv(c.num_mel_bins, width, 3),
        conv2=conv(width, width, 3, stride=2),
        layers=layers(c, "encoder", lambda c: encoder_block(c, seeing)),
        embed_positions=position_table(c.max_source_positions, width),
        norm=norm(c),
        dropout=float(c.dropout),
    )
    return asked(c, "Whisper", lambda: own)(
        embed_tokens=embedding(c.vocab_size, width),
        encoder=encoder,
        layers=layers(c, "decoder", lambda c: decoder_block(c, seeing, crossing)),
        embed_positions=position_table(c.max_target_positions, width),
        norm=norm(c),
        dropout=float(c.dropout),
        shift=shifted(c),
    )

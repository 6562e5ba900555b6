"""BART: learned positions from row 2 on, norms over the embeddings and after each sublayer."""

from __future__ import annotations

from functools import partial
from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.core.tree import zeros_param
from flaxen.families.family import Family, family
from flaxen.families.seq2seq import (
    NAMES,
    SIDES,
    asked,
    layers,
    norm,
    post_norm_decoder_block,
    post_norm_encoder_block,
    shifted,
    table,
)
from flaxen.layers.positions import later_positions
from flaxen.models.encoder_decoder import EncoderDecoder, SelfShift
from flaxen.models.tower import TextEncoder

FAMILIES: dict[str, Family] = {}


def sides(c: Any) -> list[dict[str, Any]]:
    """What stands around the layers of encoder and decoder."""
    return [
        {
            "embed_positions": later_positions(c.max_position_embeddings, c.d_model),
            "embed_norm": norm(c),
            "dropout": float(c.dropout),
        }
        for _ in SIDES
    ]


def head(c: Any) -> dict[str, Any]:
    """The file has (1, vocab)."""
    return {"logits_bias": zeros_param("1 vocab", vocab=c.vocab_size)}


@family(FAMILIES, "bart", NAMES, spare=r"classification_head\.|qa_outputs\.")
def bart(c: Any) -> EncoderDecoder:
    c.get("classifier_dropout")  # of heads that are not made here
    if not c.tie_word_embeddings:
        raise ConfigError("tie_word_embeddings is false; BART's head is always tied. Set it true.")
    encoder, decoder = sides(c)
    return asked(c, "Bart", partial(head, c))(
        embed_tokens=table(c),
        encoder=TextEncoder(layers=layers(c, "encoder", post_norm_encoder_block), **encoder),
        layers=layers(c, "decoder", post_norm_decoder_block),
        shift=shifted(c, SelfShift),
        **decoder,
    )

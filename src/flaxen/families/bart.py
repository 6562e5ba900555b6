"""BART: learned positions from row 2 on, norms over the embeddings and after each sublayer; mBART,
Pegasus and Marian, which differ in these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.core.tree import zeros_param
from flaxen.families.family import Family, family
from flaxen.families.seq2seq import (
    NAMES,
    SIDES,
    asked,
    decoder_block,
    encoder_block,
    layers,
    norm,
    post_norm_decoder_block,
    post_norm_encoder_block,
    shifted,
    table,
)
from flaxen.layers.linear import position_table
from flaxen.layers.positions import WavePositions
from flaxen.models.encoder_decoder import EncoderDecoder
from flaxen.models.shift import LanguageShift, SelfShift, Shift
from flaxen.models.tower import TextEncoder

FAMILIES: dict[str, Family] = {}

BIAS = r"final_logits_bias"
SPARE = r"classification_head\.|qa_outputs\."


def sides(c: Any) -> list[dict[str, Any]]:
    """What stands around the layers of encoder and decoder."""
    return [
        {
            "embed_positions": position_table(c.max_position_embeddings, c.d_model, 2),
            "embed_norm": norm(c),
            "dropout": float(c.dropout),
        }
        for _ in SIDES
    ]


def head(c: Any) -> dict[str, Any]:
    """The file has (1, vocab)."""
    return {"logits_bias": zeros_param("1 vocab", vocab=c.vocab_size)}


def model(
    c: Any,
    prefix: str,
    encoder: dict[str, Any],
    decoder: dict[str, Any],
    encoder_block: Callable[[Any], Any] = post_norm_encoder_block,
    decoder_block: Callable[[Any], Any] = post_norm_decoder_block,
    shift: Shift | None = None,
    ending: str = "ForConditionalGeneration",
) -> EncoderDecoder:
    c.get("classifier_dropout")  # of heads that are not made here
    for key, wanted in (("tie_word_embeddings", True), ("is_decoder", False)):
        if c.get(key, wanted) != wanted:
            raise ConfigError(f"{key} is {not wanted}; only {wanted} is handled for {prefix}.")
    return asked(c, prefix, partial(head, c), ending)(
        embed_tokens=table(c),
        encoder=TextEncoder(layers=layers(c, "encoder", encoder_block), **encoder),
        layers=layers(c, "decoder", decoder_block),
        shift=shift or shifted(c, SelfShift),
        **decoder,
    )


@family(FAMILIES, "bart", NAMES, optional=BIAS, spare=SPARE)
def bart(c: Any) -> EncoderDecoder:
    encoder, decoder = sides(c)
    return model(c, "Bart", encoder, decoder)


def norms(c: Any) -> list[dict[str, Any]]:
    """As BART's sides, with a norm at the end of each."""
    return [side | {"norm": norm(c)} for side in sides(c)]


@family(FAMILIES, "mbart", NAMES, optional=BIAS, spare=SPARE)
def mbart(c: Any) -> EncoderDecoder:
    encoder, decoder = norms(c)
    return model(
        c, "MBart", encoder, decoder, encoder_block, decoder_block, shifted(c, LanguageShift)
    )


def plain(side: dict[str, Any], positions: Any) -> dict[str, Any]:
    """A side with other positions, and no norm over the embeddings."""
    kept = {key: part for key, part in side.items() if key != "embed_norm"}
    return kept | {"embed_positions": positions}


@family(FAMILIES, "pegasus", NAMES, optional=BIAS)
def pegasus(c: Any) -> EncoderDecoder:
    """Its positions were computed once, and count as the file holds them."""
    table = position_table(c.max_position_embeddings, c.d_model)
    encoder, decoder = (plain(side, table) for side in norms(c))
    return model(c, "Pegasus", encoder, decoder, encoder_block, decoder_block, shifted(c))


@family(FAMILIES, "marian", NAMES, optional=BIAS, buffers=r"embed_positions\.weight")
def marian(c: Any) -> EncoderDecoder:
    if not c.share_encoder_decoder_embeddings or c.get("decoder_vocab_size") != c.vocab_size:
        raise ConfigError(
            "share_encoder_decoder_embeddings is false or decoder_vocab_size is another than "
            "vocab_size: two tables of embeddings, of which only one is handled here."
        )
    waves = WavePositions(count=c.max_position_embeddings, embed=c.d_model)
    encoder, decoder = (plain(side, waves) for side in sides(c))
    return model(c, "Marian", encoder, decoder, shift=shifted(c), ending="MTModel")

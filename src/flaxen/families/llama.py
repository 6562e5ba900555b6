"""Llama and Mistral."""

from __future__ import annotations

from functools import partial
from typing import Any

from flaxen.attention import Mask
from flaxen.families.common import LLAMA, decoder, self_attn, with_attention
from flaxen.families.family import Family, family
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


@family(FAMILIES, "llama", LLAMA)
def llama(c: Any) -> Decoder:
    return decoder(c)


@family(FAMILIES, "mistral", LLAMA)
def mistral(c: Any) -> Decoder:
    window = Mask(window=c.sliding_window or None)
    return decoder(c, with_attention(partial(self_attn, mask=window)))

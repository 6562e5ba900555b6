"""Qwen 2 (biases on q, k, v) and Qwen 3 (norms on the heads of q and k)."""

from __future__ import annotations

from functools import partial
from typing import Any

from flaxen.families.common import LLAMA, decoder, head_rms, self_attn, with_attention
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


@family(FAMILIES, "qwen2", LLAMA)
def qwen2(c: Any) -> Decoder:
    return decoder(c, with_attention(partial(self_attn, bias=True, out_bias=False)))


def normed_attn(c: Any, i: int) -> Attention:
    return self_attn(c, i, q_norm=head_rms(c), k_norm=head_rms(c))


@family(FAMILIES, "qwen3", LLAMA)
def qwen3(c: Any) -> Decoder:
    return decoder(c, with_attention(normed_attn))

"""Gemma: Llama with 1 + weight in its norms and scaled embeddings. Gemma 2 and 3 (text) have norms
around each sublayer, and sliding and full layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from flaxen.core.errors import ConfigError
from flaxen.families.common import LLAMA, SANDWICH, decoder, head_dim, mlp, rotary, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.block import Block
from flaxen.layers.norm import OffsetRMSNorm, offset_rms_norm
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


def norm(c: Any) -> OffsetRMSNorm:
    return offset_rms_norm(c.rms_norm_eps, embed=c.hidden_size)


def head_norm(c: Any) -> OffsetRMSNorm:
    return offset_rms_norm(c.rms_norm_eps, head_dim=head_dim(c))


def scaled(c: Any, block: Any, **slots: Any) -> Decoder:
    """A Gemma of these blocks.

    Raises:
        ConfigError: attention in both directions.
    """
    if c.use_bidirectional_attention:
        raise ConfigError(
            "use_bidirectional_attention is true: this Gemma is an encoder, which is not "
            "supported yet."
        )
    return decoder(c, block, norm, scale=c.hidden_size**0.5, **slots)


def plain(c: Any, i: int) -> Block:
    return Block(
        self_attn=self_attn(c, i),
        mlp=mlp(c),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
    )


@family(FAMILIES, "gemma", LLAMA)
def gemma(c: Any) -> Decoder:
    return scaled(c, plain)


def sandwich(c: Any, i: int, attn: Any) -> Block:
    return Block(
        self_attn=attn(c, i),
        mlp=mlp(c, "hidden_activation"),
        input_layernorm=norm(c),
        post_attention_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
        post_feedforward_layernorm=norm(c),
    )


def attn(c: Any, i: int, **slots: Any) -> Attention:
    return self_attn(c, i, scale=c.query_pre_attn_scalar**-0.5, **slots)


@family(FAMILIES, "gemma2", SANDWICH)
def gemma2(c: Any) -> Decoder:
    capped = partial(attn, softcap=c.attn_logit_softcapping)
    block = partial(sandwich, attn=capped)
    return scaled(c, block, logit_softcap=c.final_logit_softcapping)


def normed_attn(c: Any, i: int) -> Attention:
    # Declared for Gemma 2's sake; Transformers runs Gemma 3 without it.
    c.get("attn_logit_softcapping")
    norms = {"q_norm": head_norm(c), "k_norm": head_norm(c)}
    return attn(c, i, rope=rotary(c, c.layer_types[i]), **norms)


@family(FAMILIES, "gemma3_text", SANDWICH)
def gemma3(c: Any) -> Decoder:
    block = partial(sandwich, attn=normed_attn)
    return scaled(c, block, logit_softcap=c.final_logit_softcapping)

"""Llama, Mistral, Mixtral (a mixture of experts), and the near relatives: Ministral (windows in
some layers), SmolLM 3 (some layers do not rotate), Arcee (no gate), Seed-OSS (biases, dropout).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from flaxen.attention import Mask
from flaxen.convert.transforms import WeightRenaming
from flaxen.families.common import (
    LLAMA,
    MOE,
    balance,
    block,
    decoder,
    packed,
    rotary,
    self_attn,
    with_attention,
)
from flaxen.families.family import Family, family
from flaxen.layers.attention import Attention
from flaxen.layers.block import Block
from flaxen.layers.mlp import MLP, mlp
from flaxen.layers.moe import MoE, moe
from flaxen.layers.routers import router
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


@family(FAMILIES, "llama", LLAMA)
def llama(c: Any) -> Decoder:
    return decoder(c)


def windowed_attn(c: Any, i: int) -> Attention:
    return self_attn(c, i, mask=Mask(window=c.sliding_window or None))


@family(FAMILIES, "mistral", LLAMA)
def mistral(c: Any) -> Decoder:
    return decoder(c, with_attention(windowed_attn))


@family(FAMILIES, "ministral", LLAMA)
def ministral(c: Any) -> Decoder:
    return decoder(c)


def no_gate(c: Any, i: int) -> MLP:
    return mlp(c.hidden_size, c.intermediate_size, c.hidden_act, bias=bool(c.mlp_bias))


@family(FAMILIES, "arcee", LLAMA)
def arcee(c: Any) -> Decoder:
    return decoder(c, with_attention(self_attn, no_gate))


def seed_block(c: Any, i: int) -> Block:
    attn = self_attn(c, i, out_bias=bool(c.attention_out_bias))
    made = block(c, i, lambda c, i: attn)
    return dataclasses.replace(made, dropout=float(c.residual_dropout))


@family(FAMILIES, "seed_oss", LLAMA)
def seed_oss(c: Any) -> Decoder:
    return decoder(c, seed_block)


def some_rotate(c: Any, i: int) -> Attention:
    """Where `no_rope_layers` says 1, despite its name."""
    return self_attn(c, i, rope=rotary(c) if c.no_rope_layers[i] else None)


@family(FAMILIES, "smollm3", LLAMA)
def smollm3(c: Any) -> Decoder:
    # The config class has made the list of it.
    c.get("no_rope_layer_interval")
    return decoder(c, with_attention(some_rotate))


MIXTRAL = MOE | {
    "mlp": "block_sparse_moe",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def experts(c: Any, i: int) -> MoE:
    gate = router(c.hidden_size, c.num_local_experts, c.num_experts_per_tok, normalised=True)
    return moe(gate, c.intermediate_size, c.hidden_act)


PACKED = (
    *packed("block_sparse_moe", "w1", "w3", "w2"),
    WeightRenaming(r"\.mlp\.gate\.", ".block_sparse_moe.gate."),
)


@family(FAMILIES, "mixtral", MIXTRAL, PACKED)
def mixtral(c: Any) -> Decoder:
    return decoder(c, with_attention(windowed_attn, experts), balance=balance(c))

"""Granite: multipliers for embeddings, scores, sublayers and logits; and its mixtures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from flaxen.convert.relation import Join
from flaxen.families import common
from flaxen.families.common import LLAMA, balance, dense, self_attn
from flaxen.families.family import Family, family
from flaxen.layers.around import Scaled
from flaxen.layers.block import Block
from flaxen.layers.mlp import gated_mlp
from flaxen.layers.moe import MoE, moe
from flaxen.layers.routers import RouterOfChosen, routed
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


def attn(c: Any, i: int) -> Any:
    return self_attn(c, i, scale=c.attention_multiplier)


def decoder(
    c: Any,
    ffn: Callable[[Any, int], Any],
    attn: Callable[[Any, int], Any] = attn,
    **slots: Any,
) -> Decoder:
    def block(c: Any, i: int) -> Block:
        smaller = Scaled(factor=float(c.residual_multiplier))
        return dataclasses.replace(
            common.block(c, i, attn, ffn),
            post_attention_layernorm=smaller,
            post_feedforward_layernorm=smaller,
        )

    return common.decoder(
        c,
        block,
        scale=float(c.embedding_multiplier),
        logit_scale=1 / c.logits_scaling,
        **slots,
    )


@family(FAMILIES, "granite", LLAMA)
def granite(c: Any) -> Decoder:
    return decoder(c, dense)


def experts(c: Any, i: int, shared: Any = None) -> MoE:
    gate = routed(RouterOfChosen, c.hidden_size, c.num_local_experts, c.num_experts_per_tok)
    return moe(gate, c.intermediate_size, c.hidden_act, shared)


STACKED = LLAMA | {
    "mlp": "block_sparse_moe",
    "mlp.gate": "block_sparse_moe.router.layer",
    "gate_up": Join(
        "block_sparse_moe.input_linear",
        "experts {mlp.experts.gate_proj: mlp | mlp.experts.up_proj: mlp} embed",
    ),
    "down": Join("block_sparse_moe.output_linear", "experts {mlp.experts.down_proj: embed} mlp"),
}


@family(FAMILIES, "granitemoe", STACKED)
def granitemoe(c: Any) -> Decoder:
    return decoder(c, experts, balance=balance(c))


def with_shared(c: Any, i: int) -> MoE:
    width = c.shared_intermediate_size
    return experts(c, i, gated_mlp(c.hidden_size, width, c.hidden_act) if width else None)


SHARED = STACKED | {
    "mlp.shared.down_proj": "shared_mlp.output_linear",
    "shared": Join(
        "shared_mlp.input_linear",
        "{mlp.shared.gate_proj: mlp | mlp.shared.up_proj: mlp} embed",
    ),
}


@family(FAMILIES, "granitemoeshared", SHARED)
def granitemoeshared(c: Any) -> Decoder:
    return decoder(c, with_shared, balance=balance(c))

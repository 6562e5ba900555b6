"""Phi-3.5-MoE: a mixture whose router is SparseMixer, LayerNorms, and biases where asked."""

from __future__ import annotations

from typing import Any

from flaxen.attention import Mask
from flaxen.core.errors import ConfigError
from flaxen.families import common
from flaxen.families.common import balance, head_dim, self_attn
from flaxen.families.family import Family, family
from flaxen.families.llama import MIXTRAL, PACKED
from flaxen.layers.block import Block
from flaxen.layers.moe import MoE, moe
from flaxen.layers.norm import LayerNorm, layer_norm
from flaxen.layers.rope import Rope, rope
from flaxen.layers.routers import SparseMixer, routed
from flaxen.models.decoder import Decoder

FAMILIES: dict[str, Family] = {}


def norm(c: Any) -> LayerNorm:
    return layer_norm(c.rms_norm_eps, embed=c.hidden_size)


def rotation(c: Any) -> Rope | None:
    """Other types than the default multiply cos and sin by factors of their own."""
    fields = dict(c.rope_parameters)
    if fields.get("rope_type", "default") == "default":
        return common.rotary(c)
    short, long = fields.pop("short_mscale"), fields.pop("long_mscale")
    if short != long:
        raise ConfigError(
            f"rope_parameters say short_mscale={short} and long_mscale={long}; expected the same "
            "number, as past texts would have to be read anew where one takes over from the other."
        )
    if fields["rope_type"] == "longrope":
        # Transformers never tells the length of the text, and without it stays with these.
        fields["long_factor"] = fields["short_factor"]
    return rope(fields | {"attention_factor": short}, head_dim(c), c.max_position_embeddings)


def experts(c: Any, i: int) -> MoE:
    if c.num_experts_per_tok != 2:
        raise ConfigError(
            f"num_experts_per_tok is {c.num_experts_per_tok}; this router always takes 2."
        )
    slots = {"jitter": float(c.router_jitter_noise)}
    gate = routed(SparseMixer, c.hidden_size, c.num_local_experts, 2, **slots)
    return moe(gate, c.intermediate_size, c.hidden_act)


def block(c: Any, i: int) -> Block:
    return Block(
        self_attn=self_attn(c, i, rope=rotation(c), mask=Mask(window=c.sliding_window or None)),
        mlp=experts(c, i),
        input_layernorm=norm(c),
        pre_feedforward_layernorm=norm(c),
    )


TIED_BIAS = {"embed_tokens.bias": "lm_head.bias"}


@family(FAMILIES, "phimoe", MIXTRAL | TIED_BIAS, PACKED)
def phimoe(c: Any) -> Decoder:
    # Noise on the inputs is for training alone.
    c.get("input_jitter_noise")
    c.get("original_max_position_embeddings")
    return common.decoder(c, block, norm, head_bias=bool(c.lm_head_bias), balance=balance(c))

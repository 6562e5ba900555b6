"""Pixtral's tower for pictures of any size, inside LLaVA and Mistral 3."""

from __future__ import annotations

from typing import Any

from flaxen.attention import Mask
from flaxen.convert.relation import Under
from flaxen.core.errors import ConfigError
from flaxen.families.towers import pair
from flaxen.layers.attention import attention
from flaxen.layers.block import Block
from flaxen.layers.mlp import gated_mlp
from flaxen.layers.norm import rms_norm
from flaxen.layers.patches import flat_patches
from flaxen.layers.rope import rope
from flaxen.models.sized_vision import SizedTower

PIXTRAL_BLOCK = {
    "self_attn": "attention",
    "mlp": "feed_forward",
    "input_layernorm": "attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
}
PIXTRAL = {
    "vision.patches": "vision_tower.patch_conv",
    "vision.pre_norm": "vision_tower.ln_pre",
    "vision.layers": Under("vision_tower.transformer.layers", PIXTRAL_BLOCK),
}


def pixtral_block(c: Any, i: int) -> Block:
    width, heads, kind = c.hidden_size, c.num_attention_heads, c.rope_parameters["rope_type"]
    if kind != "axial":
        raise ConfigError(f"rope_type of the vision tower is {kind!r}; Pixtral's is 'axial'.")
    turn = rope({**c.rope_parameters, "rope_type": "axial_in_turns"}, width // heads, 0)
    attn = attention(
        embed=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        mask=Mask(causal=False),
        rope=turn,
        dropout=float(c.attention_dropout),
    )
    return Block(
        self_attn=attn,
        mlp=gated_mlp(width, c.intermediate_size, c.hidden_act),
        input_layernorm=rms_norm(1e-5, embed=width),
        pre_feedforward_layernorm=rms_norm(1e-5, embed=width),
    )


def pixtral(v: Any, merger: Any, merge: int = 1) -> SizedTower:
    # Pictures may have any size, whatever the config calls theirs.
    for key in ("image_size", "head_dim"):
        v.get(key)
    size = pair(v.patch_size)
    return SizedTower(
        patches=flat_patches(v.hidden_size, v.num_channels, size),
        pre_norm=rms_norm(1e-5, embed=v.hidden_size),
        layers=[pixtral_block(v, i) for i in range(v.num_hidden_layers)],
        merger=merger,
        merge=merge,
        size=size,
    )

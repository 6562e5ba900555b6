"""CLIP and SigLIP: a tower for texts, one for pictures, and how alike what they make is."""

from __future__ import annotations

from typing import Any

from flaxen.attention import Mask
from flaxen.convert.relation import Under
from flaxen.core.errors import ConfigError
from flaxen.core.tree import param, zeros_param
from flaxen.families.encoders import norm
from flaxen.families.family import Family, family
from flaxen.families.towers import (
    CLIP_BLOCK,
    CLIP_TOWER,
    clip_block,
    clip_vision,
    siglip_vision,
)
from flaxen.layers.linear import Linear, embedding, linear, position_table
from flaxen.layers.text_slots import FirstOf, HighestId, LastSlot
from flaxen.models.encoder import Encoder
from flaxen.models.two_towers import TwoTowers, contrastive, pairwise

FAMILIES: dict[str, Family] = {}

TEXT = CLIP_BLOCK | {
    "embed_tokens": "embeddings.token_embedding",
    "embed_positions": "embeddings.position_embedding",
    "layers": "encoder.layers",
    "norm": "final_layer_norm",
}

TOWERS = {
    "text": Under("text_model", TEXT),
    "vision": Under("vision_model", CLIP_TOWER),
    "text_head": "text_model.head",
}


def only_towers(c: Any, name: str) -> None:
    """
    Raises:
        ConfigError: a head that is not here.
    """
    asked = next(iter(c.get("architectures") or ()), name)
    if asked != name:
        raise ConfigError(f"architectures says {asked!r}; expected {name}.")
    c.get("initializer_factor")  # of fresh weights


def text(c: Any, mask: Mask, **slots: Any) -> Encoder:
    c.get("initializer_factor")
    return Encoder(
        embed_tokens=embedding(c.vocab_size, c.hidden_size),
        embed_positions=position_table(c.max_position_embeddings, c.hidden_size),
        layers=[clip_block(c, i, mask=mask) for i in range(c.num_hidden_layers)],
        norm=norm(c),
        **slots,
    )


def end_of_text(c: Any) -> HighestId | FirstOf:
    """2 was written into the configs of texts that end with the highest token."""
    end = c.eos_token_id
    return HighestId() if end == 2 else FirstOf(token=end)


def projection(c: Any, width: int, *, bias: bool = False) -> Linear:
    return linear({"embed": c.hidden_size}, {"features": width}, bias=bias)


@family(FAMILIES, "clip", TOWERS, base_prefix="")
def clip(c: Any) -> TwoTowers:
    only_towers(c, "CLIPModel")
    c.get("logit_scale_init_value")  # of fresh weights
    texts, pictures = c.inner("text_config"), c.inner("vision_config")
    texts.get("projection_dim")  # of a tower that stands alone
    return TwoTowers(
        text=text(texts, Mask()),
        vision=clip_vision(pictures),
        text_pool=end_of_text(texts),
        text_projection=projection(texts, c.projection_dim),
        visual_projection=projection(pictures, c.projection_dim),
        logit_scale=param(),
        loss=contrastive,
    )


@family(FAMILIES, "siglip", TOWERS, base_prefix="")
def siglip(c: Any) -> TwoTowers:
    only_towers(c, "SiglipModel")
    texts, pictures = c.inner("text_config"), c.inner("vision_config")
    if not pictures.vision_use_head:
        raise ConfigError(
            "vision_use_head is false: then pictures have no vector to compare with those of texts."
        )
    return TwoTowers(
        text=text(texts, Mask(causal=False)),
        vision=siglip_vision(pictures),
        text_pool=LastSlot(),
        text_head=projection(texts, texts.projection_size, bias=True),
        logit_scale=zeros_param("1"),
        logit_bias=zeros_param("1"),
        loss=pairwise,
    )

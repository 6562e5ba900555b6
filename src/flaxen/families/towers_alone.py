"""The towers of CLIP and SigLIP, each by itself."""

from __future__ import annotations

from typing import Any

from flaxen.attention import Mask
from flaxen.core.errors import ConfigError
from flaxen.families.clip import TEXT, end_of_text, projection, text
from flaxen.families.family import Family, family
from flaxen.families.towers import CLIP_BLOCK, CLIP_TOWER, clip_vision, siglip_vision
from flaxen.layers.text_slots import LastSlot
from flaxen.models.encoder import Encoder
from flaxen.models.towers_alone import PictureTower, PooledText, ProjectedText

FAMILIES: dict[str, Family] = {}


def top(part: str, prefix: str, names: dict[str, str]) -> dict[str, str]:
    """The names of what stands at the top of a tower, under a prefix; of its blocks as they are."""
    return CLIP_BLOCK | {
        f"{part}{ours}": f"{prefix}.{name}"
        for ours, name in names.items()
        if ours not in CLIP_BLOCK
    }


TEXT_ALONE = top("", "text_model", TEXT) | {
    "head.head": "text_model.head",
    "head.projection": "text_projection",
}
VISION_ALONE = top("tower.", "vision_model", CLIP_TOWER) | {"projection": "visual_projection"}


def projected(c: Any, name: str) -> bool:
    """Whether `architectures` asks for what is compared, and not for the tower alone.

    Raises:
        ConfigError: for another class.
    """
    known = [name, f"{name}WithProjection"]
    found = next(iter(c.get("architectures") or ()), name)
    if found not in known:
        raise ConfigError(f"architectures says {found!r}; expected one of {', '.join(known)}.")
    return found != name


@family(FAMILIES, "clip_text_model", TEXT_ALONE, base_prefix="text_model")
def clip_text_model(c: Any) -> Encoder:
    pool, width = end_of_text(c), c.projection_dim
    if projected(c, "CLIPTextModel"):
        return text(c, Mask(), head=ProjectedText(pool=pool, projection=projection(c, width)))
    return text(c, Mask(), head=PooledText(pool=pool))


@family(FAMILIES, "clip_vision_model", VISION_ALONE, base_prefix="vision_model")
def clip_vision_model(c: Any) -> PictureTower:
    width = c.projection_dim
    made = projection(c, width) if projected(c, "CLIPVisionModel") else None
    return PictureTower(tower=clip_vision(c), projection=made)


def alone(c: Any, name: str) -> None:
    """
    Raises:
        ConfigError: for another class than this.
    """
    found = next(iter(c.get("architectures") or ()), name)
    if found != name:
        raise ConfigError(f"architectures says {found!r}; expected {name}.")


@family(FAMILIES, "siglip_text_model", TEXT_ALONE, base_prefix="text_model")
def siglip_text_model(c: Any) -> Encoder:
    alone(c, "SiglipTextModel")
    out = projection(c, c.projection_size, bias=True)
    return text(c, Mask(causal=False), head=PooledText(pool=LastSlot(), head=out))


@family(FAMILIES, "siglip_vision_model", VISION_ALONE, base_prefix="vision_model")
def siglip_vision_model(c: Any) -> PictureTower:
    alone(c, "SiglipVisionModel")
    return PictureTower(tower=siglip_vision(c))

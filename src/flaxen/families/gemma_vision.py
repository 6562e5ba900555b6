"""Gemma 3 with pictures: SigLIP's tower, squares of whose patches become one token."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from flaxen.convert.relation import Under
from flaxen.core.errors import ConfigError
from flaxen.core.tree import param
from flaxen.families.common import SANDWICH
from flaxen.families.family import Family, family
from flaxen.families.gemma import gemma3 as gemma3_text
from flaxen.families.llava import NEWER, PROJECTOR, TOWER
from flaxen.families.seeing import only_class, seeing, under
from flaxen.families.towers import CLIP_TOWER, siglip_vision
from flaxen.layers.inner_dropout import as_kind
from flaxen.layers.mergers import PooledProjector
from flaxen.layers.norm import offset_rms_norm
from flaxen.layers.together import TogetherAttention
from flaxen.models.fixed_vision import FixedTower
from flaxen.models.vision_language import TogetherVisionLanguage, VisionLanguage

FAMILIES: dict[str, Family] = {}

GEMMA = under("language_model", SANDWICH) | PROJECTOR
SIGLIP = {"vision.tower": Under("vision_tower", CLIP_TOWER)}


def projector(c: Any, v: Any, width: int) -> PooledProjector:
    """
    Raises:
        ConfigError: patches that do not make up that many tokens.
    """
    side, tokens = v.image_size // v.patch_size, math.isqrt(c.mm_tokens_per_image)
    fits = tokens**2 == c.mm_tokens_per_image and 0 < tokens <= side
    if not fits or side // (side // tokens) != tokens:
        raise ConfigError(
            f"mm_tokens_per_image={c.mm_tokens_per_image} cannot be made of {side} x {side} "
            "patches; expected a square of a number that divides the patches of a side."
        )
    return PooledProjector(
        mm_input_projection_weight=param(features=v.hidden_size, embed=width),
        mm_soft_emb_norm=offset_rms_norm(v.layer_norm_eps, features=v.hidden_size),
        side=side,
        tokens=tokens,
    )


@family(FAMILIES, "gemma3", GEMMA | SIGLIP, (*NEWER, *TOWER))
def gemma3(c: Any) -> VisionLanguage:
    only_class(c, "Gemma3ForConditionalGeneration")
    for key in ("boi_token_index", "eoi_token_index"):
        c.get(key)  # words like others
    made = gemma3_text(c.inner("text_config", tie_word_embeddings=c.tie_word_embeddings))
    v = c.inner("vision_config")
    together = lambda b: dataclasses.replace(b, self_attn=as_kind(TogetherAttention, b.self_attn))
    # Transformers caps the scores of the text model alone, not of the one that sees.
    layers = [together(b) for b in made.layers]
    made = dataclasses.replace(made, layers=layers, logit_softcap=None)
    vision = FixedTower(
        tower=siglip_vision(v),
        projector=projector(c, v, made.embed_tokens.weight.shape[1]),
        tokens=c.mm_tokens_per_image,
    )
    return seeing(made, vision, (c.image_token_index,), kind=TogetherVisionLanguage)

"""LLaVA and Mistral 3: a vision model, a projector and a language model, each of its own family."""

from __future__ import annotations

from typing import Any

from flaxen.convert.relation import Under
from flaxen.convert.transforms import WeightRenaming
from flaxen.core.errors import ConfigError
from flaxen.families import find
from flaxen.families.common import LLAMA
from flaxen.families.family import Family, Reading, family
from flaxen.families.pixtral import PIXTRAL, pixtral
from flaxen.families.seeing import only_class, seeing, under
from flaxen.families.towers import CLIP_TOWER, clip_vision, siglip_vision
from flaxen.layers.linear import linear
from flaxen.layers.mergers import MergingProjector, PatchMerger, Projector
from flaxen.layers.norm import rms_norm
from flaxen.models.decoder import Decoder
from flaxen.models.fixed_vision import FixedTower, patch_count
from flaxen.models.vision_language import VisionLanguage

FAMILIES: dict[str, Family] = {}

PROJECTOR = {
    "vision.projector": Under("multi_modal_projector", {}),
    "vision.merger": Under("multi_modal_projector", {}),
}


def text(c: Any) -> Decoder:
    """The language model that the config has inside.

    Raises:
        ConfigError: one whose tensors are named otherwise than Llama's.
    """
    inner = c.inner("text_config", tie_word_embeddings=c.tie_word_embeddings)
    found = find(inner.model_type)
    if found.names != LLAMA:
        raise ConfigError(
            f"text_config is of a {inner.model_type} model; expected one with Llama's tensors: "
            "llama, mistral, qwen2 or qwen3."
        )
    return found.build(inner)


def states(c: Any) -> tuple[int, ...]:
    layer = c.vision_feature_layer
    return (layer,) if isinstance(layer, int) else tuple(layer)


def sides(c: Any, width: int, made: Decoder) -> dict[str, Any]:
    """The two products of a projector, from so many channels."""
    out, bias = made.embed_tokens.weight.shape[1], bool(c.multimodal_projector_bias)
    return {
        "linear_1": linear({"features": width}, {"mlp": out}, bias=bias),
        "linear_2": linear({"mlp": out}, {"embed": out}, bias=bias),
        "act": c.projector_hidden_act,
    }


def fixed(c: Any, v: Reading, made: Decoder) -> FixedTower:
    """Of a vision model with pictures of one size."""
    kinds = {"clip_vision_model": clip_vision, "siglip_vision_model": siglip_vision}
    if v.model_type not in kinds:
        raise ConfigError(
            f"vision_config is of a {v.model_type} model; expected one of {', '.join(kinds)} or "
            "pixtral."
        )
    tower, asked = kinds[v.model_type](v), states(c)
    skip = int(c.vision_feature_select_strategy == "default")
    return FixedTower(
        tower=tower,
        projector=Projector(**sides(c, len(asked) * v.hidden_size, made)),
        tokens=patch_count(tower) - skip,
        states=asked,
        skip=skip,
    )


def only_last(c: Any) -> None:
    """
    Raises:
        ConfigError: where Pixtral's states are taken before the last layer.
    """
    if states(c) != (-1,):
        raise ConfigError(
            f"vision_feature_layer={c.vision_feature_layer}; with Pixtral only -1 is supported."
        )


NEWER = (
    WeightRenaming(r"^model\.language_model\.", "language_model.model."),
    WeightRenaming(r"^lm_head\.", "language_model.lm_head."),
    WeightRenaming(r"^model\.multi_modal_projector\.", "multi_modal_projector."),
    WeightRenaming(r"^model\.vision_tower\.", "vision_tower."),
)
"""The names that the classes of Transformers have had since."""

TOWER = (WeightRenaming(r"^vision_tower\.vision_model\.", "vision_tower."),)
"""A CLIP or SigLIP inside had a model inside, and most files are of that time."""

LLAVA = {"vision.tower": Under("vision_tower", CLIP_TOWER)}


@family(FAMILIES, "llava", under("language_model") | LLAVA | PIXTRAL | PROJECTOR, (*NEWER, *TOWER))
def llava(c: Any) -> VisionLanguage:
    only_class(c, "LlavaForConditionalGeneration")
    c.get("image_seq_length")  # which the processor reads
    made, v = text(c), c.inner("vision_config")
    if v.model_type == "pixtral":
        only_last(c)
        c.get("vision_feature_select_strategy")
        vision: Any = pixtral(v, Projector(**sides(c, v.hidden_size, made)))
    else:
        vision = fixed(c, v, made)
    return seeing(made, vision, (c.image_token_index,))


@family(FAMILIES, "mistral3", under("language_model") | PIXTRAL | PROJECTOR, NEWER)
def mistral3(c: Any) -> VisionLanguage:
    only_class(c, "Mistral3ForConditionalGeneration")
    only_last(c)
    made, v, merge = text(c), c.inner("vision_config"), c.spatial_merge_size
    inner = {"features": v.hidden_size, "parts": merge**2}
    merger = MergingProjector(
        **sides(c, v.hidden_size, made),
        norm=rms_norm(c.text_config.rms_norm_eps, embed=v.hidden_size),
        patch_merger=PatchMerger(
            merging_layer=linear(inner, {"embed": v.hidden_size}), group=merge**2
        ),
    )
    return seeing(made, pixtral(v, merger, merge), (c.image_token_index,))

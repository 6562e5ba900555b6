"""What variants are drawn from: the small models of the tests, and the heads that these lack."""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import encoder_cases
import golden


@dataclasses.dataclass(frozen=True)
class Base:
    """A class of Transformers, how it is called, and a config of which the rest is default."""

    architecture: str
    kind: str
    config: dict[str, Any] = dataclasses.field(hash=False)


KINDS = {
    "causal": "causal",
    "encoder": "encoder",
    "seq2seq": "answers",
    "whisper": "answers",
    "vision": "vision",
    "clip": "two_towers",
    "qwen2_vl": "seeing",
    "seeing": "seeing",
}
"""Kind of a golden case -> how its variants are called."""

HEADS: dict[str, list[tuple[str, str]]] = {
    "t5": [("T5EncoderModel", "encoder")],
    "bart": [("BartModel", "answers")],
    "vit": [("ViTModel", "vision")],
    "dinov2": [("Dinov2Model", "vision")],
    "dinov2_with_registers": [("Dinov2WithRegistersModel", "vision")],
    "llama": [("LlamaForSequenceClassification", "encoder")],
    "clip_text_model": [("CLIPTextModelWithProjection", "text_tower")],
    "clip_vision_model": [("CLIPVisionModelWithProjection", "vision")],
}
"""More classes of the first base of a model type."""

BIOGPT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
SIGLIP_AND_QWEN = {
    "image_token_index": 120,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "text_config": {
        "model_type": "qwen2",
        "vocab_size": 128,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "vision_use_head": False,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    },
}
OTHERS = {
    "biogpt": Base("BioGptForCausalLM", "causal", BIOGPT),
    "llava": Base("LlavaForConditionalGeneration", "seeing", SIGLIP_AND_QWEN),
}
"""Of model types, or of parts of them, that no golden case is of."""

TOWERS = {
    "clip_text_model": ("clip", "text_config", "CLIPTextModel"),
    "clip_vision_model": ("clip", "vision_config", "CLIPVisionModel"),
    "siglip_text_model": ("siglip", "text_config", "SiglipTextModel"),
    "siglip_vision_model": ("siglip", "vision_config", "SiglipVisionModel"),
}


def bases(model_type: str) -> list[Base]:
    """All bases of a model type."""
    found = [*_golden().get(model_type, []), *_encoders().get(model_type, [])]
    if model_type in TOWERS:
        whole, side, architecture = TOWERS[model_type]
        kind = "text_tower" if side == "text_config" else "vision"
        found.append(Base(architecture, kind, golden.about(whole)["config_kwargs"][side]))
    if model_type in OTHERS:
        found.append(OTHERS[model_type])
    more = [Base(name, kind, found[0].config) for name, kind in HEADS.get(model_type, [])]
    return found + more


@functools.cache
def _golden() -> dict[str, list[Base]]:
    found: dict[str, list[Base]] = {}
    for name in golden.cases(None):
        about = golden.about(name)
        base = Base(about["architecture"], KINDS[about["kind"]], about["config_kwargs"])
        found.setdefault(about["model_type"], []).append(base)
    return found


@functools.cache
def _encoders() -> dict[str, list[Base]]:
    """One of each head."""
    found: dict[str, dict[str, Base]] = {}
    for name in encoder_cases.names():
        config = encoder_cases.config(name)
        (architecture,) = config["architectures"]
        rest = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
        base = Base(architecture, "encoder", rest)
        found.setdefault(config["model_type"], {}).setdefault(architecture, base)
    return {model_type: list(heads.values()) for model_type, heads in found.items()}

"""Families: for each model type, a function from the Hugging Face config to an abstract model, and
a names table.
"""

from __future__ import annotations

import importlib

from flaxen.core.errors import ConfigError, did_you_mean
from flaxen.families.family import Family

FILES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "smollm3": "llama",
    "ministral": "llama",
    "arcee": "llama",
    "seed_oss": "llama",
    "olmo": "olmo",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "olmoe": "olmo",
    "glm": "glm",
    "glm4": "glm",
    "glm4_moe": "glm",
    "granite": "granite",
    "granitemoe": "granite",
    "granitemoeshared": "granite",
    "ernie4_5": "ernie",
    "ernie4_5_moe": "ernie",
    "apertus": "apertus",
    "helium": "helium",
    "exaone4": "exaone",
    "hunyuan_v1_dense": "hunyuan",
    "hunyuan_v1_moe": "hunyuan",
    "phimoe": "phimoe",
    "gpt_oss": "gpt_oss",
    "llama4_text": "llama4",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "phi3": "phi",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "qwen2_moe": "qwen",
    "qwen3_moe": "qwen",
    "phi": "phi",
    "gpt2": "gpt",
    "gpt_bigcode": "gpt",
    "gpt_neo": "gpt",
    "gptj": "gpt",
    "gpt_neox": "neox",
    "persimmon": "neox",
    "falcon": "falcon",
    "bloom": "bloom",
    "mpt": "bloom",
    "opt": "opt",
    "biogpt": "opt",
    "starcoder2": "starcoder",
    "stablelm": "stablelm",
    "cohere": "cohere",
    "cohere2": "cohere",
    "nemotron": "nemotron",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "mamba": "mamba",
    "mamba2": "mamba",
    "falcon_mamba": "mamba",
    "lfm2": "lfm",
    "lfm2_moe": "lfm",
    "jamba": "jamba",
    "bamba": "bamba",
    "granitemoehybrid": "bamba",
    "minimax": "minimax",
    "qwen3_next": "qwen_next",
    "bert": "bert",
    "nomic_bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "mpnet": "roberta",
    "distilbert": "distilbert",
    "modernbert": "modernbert",
    "vit": "vit",
    "dinov2": "vit",
    "dinov2_with_registers": "vit",
    "clip": "clip",
    "siglip": "clip",
    "clip_text_model": "towers_alone",
    "clip_vision_model": "towers_alone",
    "siglip_text_model": "towers_alone",
    "siglip_vision_model": "towers_alone",
    "qwen2_vl": "qwen_vl",
    "qwen2_5_vl": "qwen_vl",
    "llava": "llava",
    "mistral3": "llava",
    "gemma3": "gemma_vision",
    "t5": "t5",
    "mt5": "t5",
    "umt5": "t5",
    "bart": "bart",
    "mbart": "bart",
    "pegasus": "bart",
    "marian": "bart",
    "whisper": "whisper",
}
"""Which file holds a model type; only that file is imported."""


def find(model_type: str) -> Family:
    """The family of a model type.

    Raises:
        ConfigError: naming the known ones.
    """
    if model_type not in FILES:
        raise ConfigError(
            f"No family for model_type {model_type!r}.{did_you_mean(model_type, FILES, 8)} "
            "`flaxen families` lists what there is; docs/adding-a-family.md shows how to add one."
        )
    file = importlib.import_module(f"flaxen.families.{FILES[model_type]}")
    return file.FAMILIES[model_type]

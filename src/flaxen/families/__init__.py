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
    "phi3": "phi",
    "qwen2": "qwen",
    "qwen3": "qwen",
    "qwen2_moe": "qwen",
    "qwen3_moe": "qwen",
    "gpt2": "gpt",
    "gemma3_text": "gemma",
    "bert": "bert",
    "nomic_bert": "bert",
    "roberta": "roberta",
    "xlm-roberta": "roberta",
    "mpnet": "roberta",
    "distilbert": "distilbert",
    "modernbert": "modernbert",
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
            f"No family for model_type {model_type!r}.{did_you_mean(model_type, FILES)} "
            "docs/adding-a-family.md shows how to add one."
        )
    file = importlib.import_module(f"flaxen.families.{FILES[model_type]}")
    return file.FAMILIES[model_type]

"""Hugging Face models in JAX.

Names are imported when they are first used, so `import flaxen` costs nothing, starts no jax backend
and changes no environment variable.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flaxen.attention import AttentionSettings, Blocks
    from flaxen.cache import CacheSettings
    from flaxen.core.errors import (
        CacheError,
        CheckpointError,
        ConfigError,
        FlaxenError,
        InputError,
        PlanError,
    )
    from flaxen.layers.checkpointing import Checkpointing
    from flaxen.layers.runtime import MLPSettings, Runtime, WeightSettings
    from flaxen.model import Model
    from flaxen.pretrained import load
    from flaxen.shard import Plan, make_mesh
    from flaxen.text import tokenizer

__version__ = "0.1.0"

__all__ = [
    "AttentionSettings",
    "Blocks",
    "CacheError",
    "CacheSettings",
    "CheckpointError",
    "Checkpointing",
    "ConfigError",
    "FlaxenError",
    "InputError",
    "MLPSettings",
    "Model",
    "Plan",
    "PlanError",
    "Runtime",
    "WeightSettings",
    "__version__",
    "load",
    "make_mesh",
    "tokenizer",
]

_HOME = {
    "AttentionSettings": "flaxen.attention",
    "Blocks": "flaxen.attention",
    "CacheError": "flaxen.core.errors",
    "CacheSettings": "flaxen.cache",
    "CheckpointError": "flaxen.core.errors",
    "Checkpointing": "flaxen.layers.checkpointing",
    "ConfigError": "flaxen.core.errors",
    "FlaxenError": "flaxen.core.errors",
    "InputError": "flaxen.core.errors",
    "MLPSettings": "flaxen.layers.runtime",
    "Model": "flaxen.model",
    "Plan": "flaxen.shard",
    "PlanError": "flaxen.core.errors",
    "Runtime": "flaxen.layers.runtime",
    "WeightSettings": "flaxen.layers.runtime",
    "load": "flaxen.pretrained",
    "make_mesh": "flaxen.shard",
    "tokenizer": "flaxen.text",
}

_ROOMS = (
    "attention",
    "cache",
    "convert",
    "core",
    "easydel",
    "embed",
    "families",
    "generate",
    "layers",
    "models",
    "quantize",
    "shard",
    "show",
    "text",
    "train",
    "tune",
)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"flaxen.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'flaxen' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS})

"""Adapters of all kinds, and their files."""

from __future__ import annotations

from flaxen.tune.leaf import DEFAULT, Adapter, DoRA, LowRank, Replaced
from flaxen.tune.lora import add_lora
from flaxen.tune.peft import load_adapter, save_adapter
from flaxen.tune.rows import for_rows
from flaxen.tune.several import (
    adapter_names,
    adapters,
    merge,
    set_adapters,
    trainable_paths,
    with_dropout,
    without_adapters,
)

__all__ = [
    "DEFAULT",
    "Adapter",
    "DoRA",
    "LowRank",
    "Replaced",
    "adapter_names",
    "adapters",
    "add_lora",
    "for_rows",
    "load_adapter",
    "merge",
    "save_adapter",
    "set_adapters",
    "trainable_paths",
    "with_dropout",
    "without_adapters",
]

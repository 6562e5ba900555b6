"""Low-rank adapters, and their files."""

from __future__ import annotations

from flaxen.tune.lora import LowRank, adapters, add_lora, merge
from flaxen.tune.peft import load_adapter, save_adapter

__all__ = ["LowRank", "adapters", "add_lora", "load_adapter", "merge", "save_adapter"]

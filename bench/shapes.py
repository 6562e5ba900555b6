"""The model that every measurement is made with, and the folders that hold it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

CACHE = Path(__file__).parent.parent / ".cache" / "bench"

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Llama-shaped, 110M parameters."""

PROMPT, NEW = 32, 48
"""Decoding: tokens of the prompt, and timed tokens after the first new one."""


STEP = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
"""AdamW of a training step; gradients are clipped to a norm of 1."""


def batch_of(rows: int, length: int) -> np.ndarray:
    """Token ids (rows, length), the same on every side."""
    return np.random.default_rng(0).integers(3, CONFIG["vocab_size"], (rows, length))


def folder(dtype: str) -> Path:
    """The model in a dtype, written by `model.save` on first use."""
    path = CACHE / f"llama-{dtype}"
    if not (path / "config.json").exists():
        from flaxen.pretrained import from_config

        from_config(CONFIG, dtype=dtype, seed=0).save(path)
    return path


def describe(config: dict) -> str:
    return json.dumps({k: v for k, v in config.items() if isinstance(v, int | float)})

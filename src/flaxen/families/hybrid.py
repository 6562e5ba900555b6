"""What hybrids of recurrent layers and attention share."""

from __future__ import annotations

from typing import Any

ATTENTION = (
    "attention_bias",
    "attention_dropout",
    "head_dim",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "rope_parameters",
)
"""Keys of attention layers."""


def maybe_absent(c: Any, *more: str) -> None:
    """Read the keys of attention layers and others: a config may say none of its layers is of the
    kind that they speak of, and then they change nothing.
    """
    for key in (*ATTENTION, *more):
        c.get(key)

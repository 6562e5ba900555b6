"""What calling a model gives back, under Hugging Face's names."""

from __future__ import annotations

from typing import Any

import jax

from flaxen.core.tree import module


@module
class CausalOutput:
    """logits: (B, T, V) float; loss: scalar, if labels were given; hidden_states: embeddings, then
    each layer's (B, T, D), if asked.
    """

    logits: jax.Array
    loss: jax.Array | None = None
    past_key_values: Any = None
    hidden_states: tuple[jax.Array, ...] | None = None

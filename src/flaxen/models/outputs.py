"""What calling a model gives back, under Hugging Face's names."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from flaxen.core.tree import module


@module
class CausalOutput:
    """logits: (B, T, V) float; loss: scalar, if labels were given; hidden_states: embeddings, then
    each layer's (B, T, D), if asked; attentions: each layer's (B, N, T, T), if asked.
    """

    logits: jax.Array
    loss: jax.Array | None = None
    past_key_values: Any = None
    hidden_states: tuple[jax.Array, ...] | None = None
    attentions: tuple[jax.Array, ...] | None = None

    def to_tuple(self) -> tuple[Any, ...]:
        """What there is, in Hugging Face's order: the loss first, if there is one."""
        first = ("loss", "logits")
        rest = (f.name for f in dataclasses.fields(self) if f.name not in first)
        return tuple(x for x in (getattr(self, name) for name in (*first, *rest)) if x is not None)

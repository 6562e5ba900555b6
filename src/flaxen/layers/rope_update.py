"""Frequencies that depend on the calls before, as `dynamic_rope_update` documents them.

`Rope.tables` has no history: equal positions give equal tables. Here the history is a value that
goes in and comes out, so a call stays a pure function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flaxen.core.tree import module, static
from flaxen.layers.rope import Rope


@module
class StatefulRope:
    """A rope and what its last call left behind.

    max_seq_len_cached: () int32, the length that dynamic frequencies were made for. They follow a
    longer text, stay as they are for a shorter one, and go back to the first ones for a text
    shorter than `max_positions`. inv_freq: float32 frequencies. LongRoPE has no such memory: its
    frequencies follow each call's length. All other types never change.
    """

    rope: static[Rope]
    max_seq_len_cached: jax.Array
    inv_freq: jax.Array

    @classmethod
    def start(cls, rope: Rope) -> StatefulRope:
        """Before the first call."""
        length, (inv, _) = jnp.int32(rope.max_positions), rope.frequencies()
        return cls(rope=rope, max_seq_len_cached=length, inv_freq=jnp.asarray(inv))

    @property
    def attention_scaling(self) -> float:
        """The factor on cos and sin, the same for every length."""
        return self.rope.frequencies()[1]

    def update(self, positions: jax.Array) -> StatefulRope:
        """The state that a call with these positions computes with, and leaves behind."""
        length = jnp.max(positions).astype(jnp.int32) + 1
        cached, first = self.max_seq_len_cached, self.rope.max_positions
        if self.rope.kind == "longrope":
            made_for = length
        elif "dynamic" in self.rope.kind:
            forgets = (length < first) & (cached > first)
            cached = jnp.where(forgets, first, jnp.maximum(length, cached))
            made_for = cached
        else:
            return self
        inv, _ = self.rope.frequencies(made_for)
        return StatefulRope(rope=self.rope, max_seq_len_cached=cached, inv_freq=inv)

    def tables(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos and sin of the frequencies as they are; see `Rope.tables`."""
        return self.rope.tables_with(self.inv_freq, self.attention_scaling, positions)


def dynamic_rope_update(forward: Callable[[StatefulRope, Any, jax.Array], Any]) -> Any:
    """Decorator: `forward(rotary, x, position_ids)` gets a rotary that knows these positions.

    The decorated function gives a pair: the result, and the rotary to call it with next time. With
    a `layer_type`, rotary is a dict of one state for each layer type.
    """

    @functools.wraps(forward)
    def wrapper(
        rotary: Any, x: Any, position_ids: jax.Array, layer_type: str | None = None
    ) -> tuple[Any, Any]:
        if layer_type is None:
            rotary = rotary.update(position_ids)
            return forward(rotary, x, position_ids), rotary
        one = rotary[layer_type].update(position_ids)
        return forward(one, x, position_ids), {**rotary, layer_type: one}

    return wrapper

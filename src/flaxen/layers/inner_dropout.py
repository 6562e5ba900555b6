"""Parts that drop numbers where others do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from flaxen.core.tree import module, static
from flaxen.layers.attention import Attention
from flaxen.layers.context import Context
from flaxen.layers.dropout import dropout
from flaxen.layers.linear import Linear, linear
from flaxen.layers.mlp import ACTIVATIONS, MLP, GatedMLP


@module
class DroppingAttention(Attention):
    """Attention whose result is dropped at the rate `out_dropout`."""

    out_dropout: static[float] = 0.0

    def __call__(self, x: jax.Array, ctx: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        y, cache = super().__call__(x, ctx, cache)
        return dropout(y, self.out_dropout, ctx.of_layer(3).dropout_key), cache


@module
class DroppingGatedMLP(GatedMLP):
    """down(drop(act(gate(x)) * up(x)))."""

    dropout: static[float] = 0.0

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        h = ACTIVATIONS[self.act](self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(dropout(h, self.dropout, ctx.of_layer(4).dropout_key))


@module
class DroppingMLP(MLP):
    """down(drop(act(up(x))))."""

    dropout: static[float] = 0.0

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        h = ACTIVATIONS[self.act](self.up_proj(x))
        return self.down_proj(dropout(h, self.dropout, ctx.of_layer(4).dropout_key))


@module
class GatedFeedForward:
    """down(drop(act(gate(x)) * linear(x))): T5's, whose parts go by other names than those of its
    `MLP`, as in its files.
    """

    gate_proj: Linear
    linear_proj: Linear
    down_proj: Linear
    act: static[str]
    dropout: static[float] = 0.0

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        h = ACTIVATIONS[self.act](self.gate_proj(x)) * self.linear_proj(x)
        return self.down_proj(dropout(h, self.dropout, ctx.of_layer(4).dropout_key))


def gated_feed_forward(embed: int, mlp: int, act: str, rate: float = 0.0) -> GatedFeedForward:
    ACTIVATIONS[act]
    D, F = {"embed": embed}, {"mlp": mlp}
    return GatedFeedForward(
        gate_proj=linear(D, F),
        linear_proj=linear(D, F),
        down_proj=linear(F, D),
        act=act,
        dropout=rate,
    )


def as_kind(kind: Any, part: Any, **more: Any) -> Any:
    """The same part as one of a kind that has more fields."""
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return kind(**fields, **more)

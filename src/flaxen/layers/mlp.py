"""Feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from flaxen.core.registry import Registry
from flaxen.core.tree import module, static
from flaxen.layers.context import Context
from flaxen.layers.linear import Linear, linear

Activation = Callable[[jax.Array], jax.Array]


def relu2(x: jax.Array) -> jax.Array:
    """The square of what is above zero."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: Registry[Activation] = Registry("activation")
"""By the names that configs use; registered once, so that equal layers compare equal."""

for _name, _function in {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu2": relu2,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}.items():
    ACTIVATIONS.register(_name, _function)


@module
class GatedMLP:
    """down(act(gate(x)) * up(x))."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    act: static[str]

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        """x (B, T, D) -> (B, T, D)."""
        return self.down_proj(ACTIVATIONS[self.act](self.gate_proj(x)) * self.up_proj(x))


def gated_mlp(embed: int, mlp: int, act: str, *, bias: bool = False) -> GatedMLP:
    ACTIVATIONS[act]
    D, F = {"embed": embed}, {"mlp": mlp}
    return GatedMLP(
        gate_proj=linear(D, F, bias=bias),
        up_proj=linear(D, F, bias=bias),
        down_proj=linear(F, D, bias=bias),
        act=act,
    )


@module
class MLP:
    """down(act(up(x)))."""

    up_proj: Linear
    down_proj: Linear
    act: static[str]

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        """x (B, T, D) -> (B, T, D)."""
        return self.down_proj(ACTIVATIONS[self.act](self.up_proj(x)))


def mlp(embed: int, mlp: int, act: str, *, bias: bool = False) -> MLP:
    ACTIVATIONS[act]
    D, F = {"embed": embed}, {"mlp": mlp}
    return MLP(up_proj=linear(D, F, bias=bias), down_proj=linear(F, D, bias=bias), act=act)

"""How we run a model, as opposed to what the checkpoint says."""

from __future__ import annotations

import dataclasses

import jax

from flaxen.attention import AttentionSettings
from flaxen.cache import CacheSettings
from flaxen.shard import Placement


@dataclasses.dataclass(frozen=True)
class Checkpointing:
    """What the backward pass computes again instead of remembering it.

    policy: None remembers everything. every: the layers whose index divides by it.
    """

    policy: str | None = None
    every: int = 1


@dataclasses.dataclass(frozen=True)
class MLPSettings:
    """scan: run feed-forward networks over pieces of `chunk` tokens, one after another."""

    scan: bool = False
    chunk: int = 1024


@dataclasses.dataclass(frozen=True)
class WeightSettings:
    """How weights are stored and multiplied.

    bits: 8 or 4 for weights that stay packed. dtype: what is computed in; param_dtype: what is
    stored; None is the checkpoint's own. precision: of products, as jax names them: "highest".
    """

    bits: int | None = None
    dtype: str | None = None
    param_dtype: str | None = None
    precision: str | None = None


@dataclasses.dataclass(frozen=True)
class Runtime:
    """One value for each way of running; `placement` is a plan on a mesh."""

    placement: Placement | None = None
    attention: AttentionSettings = AttentionSettings()
    cache: CacheSettings = CacheSettings()
    mlp: MLPSettings = MLPSettings()
    checkpointing: Checkpointing = Checkpointing()
    weights: WeightSettings = WeightSettings()

    def constrain(self, x: jax.Array, *axes: str) -> jax.Array:
        """Lay an activation out as the plan says; without a plan, nothing."""
        return x if self.placement is None else self.placement.constrain(x, axes)


PLAIN = Runtime()
"""One device, everything chosen for us."""

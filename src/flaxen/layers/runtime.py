"""How we run a model, as opposed to what the checkpoint says."""

from __future__ import annotations

import dataclasses

import jax

from flaxen.attention import AttentionSettings
from flaxen.cache import CacheSettings
from flaxen.core.errors import ConfigError
from flaxen.layers.checkpointing import Checkpointing
from flaxen.shard import Placement


@dataclasses.dataclass(frozen=True)
class MLPSettings:
    """scan: run feed-forward networks over pieces of at most `chunk` tokens, one after another."""

    scan: bool = False
    chunk: int = 1024

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < 1:
            raise ConfigError(f"mlp.chunk is {self.chunk!r}; expected a number of tokens from 1.")


@dataclasses.dataclass(frozen=True)
class Runtime:
    """One value for each way of running; `placement` is a plan on a mesh."""

    placement: Placement | None = None
    attention: AttentionSettings = AttentionSettings()
    cache: CacheSettings = CacheSettings()
    mlp: MLPSettings = MLPSettings()
    checkpointing: Checkpointing = dataclasses.field(default_factory=Checkpointing)

    def constrain(self, x: jax.Array, *axes: str) -> jax.Array:
        """Lay an activation out as the plan says; without a plan, nothing."""
        return x if self.placement is None else self.placement.constrain(x, axes)


PLAIN = Runtime()
"""One device, everything chosen for us."""

RINGS = Runtime(cache=CacheSettings(layout="ring"))
"""With a ring in every layer with a window: what other caches are compared with."""

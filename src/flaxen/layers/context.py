"""What every layer may look at besides the residual stream."""

from __future__ import annotations

import dataclasses

import jax

from flaxen.attention import Scene
from flaxen.core.tree import module, static
from flaxen.layers.rope import Rope
from flaxen.shard import Placement


@dataclasses.dataclass(frozen=True)
class Runtime:
    """How we run a model, as opposed to what the checkpoint says.

    `attention` names a mechanism or `auto`; `remat` recomputes blocks in the backward pass;
    `placement` is a plan on a mesh.
    """

    attention: str = "auto"
    remat: bool = False
    placement: Placement | None = None

    def constrain(self, x: jax.Array, *axes: str) -> jax.Array:
        """Lay an activation out as the plan says; without a plan, nothing."""
        return x if self.placement is None else self.placement.constrain(x, axes)


PLAIN = Runtime()
"""One device, everything chosen for us."""


@module
class Context:
    """positions: (B, T) for rotary embeddings; rotary: (cos, sin) for each of `ropes`; at: the slot
    where new keys go, with a cache.
    """

    positions: jax.Array
    scene: Scene
    rotary: tuple[tuple[jax.Array, jax.Array], ...]
    at: jax.Array | None = None
    ropes: static[tuple[Rope, ...]] = ()
    runtime: static[Runtime] = PLAIN

    def rotation(self, rope: Rope) -> tuple[jax.Array, jax.Array]:
        """cos and sin of a rope at this context's positions, (B, T, half), computed once for all
        layers.
        """
        return self.rotary[self.ropes.index(rope)]

"""A plan on a mesh: shardings for weights, constraints for activations."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flaxen.core.errors import PlanError, did_you_mean
from flaxen.core.tree import Param, is_param, paths
from flaxen.shard.mesh import MESH_AXES, MeshSpec
from flaxen.shard.plan import Plan, Rules, plan_named


@dataclasses.dataclass(frozen=True)
class Placement:
    """A plan on a mesh, which is built from its description when it is first looked at.

    A mesh that is what its sizes describe on these devices is kept as that description.

    Raises:
        PlanError: when a mesh axis larger than 1 is used by no rule, or a rule names an axis that
        is neither in the mesh nor standard.
    """

    on: MeshSpec | Mesh
    plan: Plan

    def __post_init__(self) -> None:
        if isinstance(self.on, Mesh):
            described = MeshSpec.of(dict(self.on.shape))
            if self.on.size <= jax.device_count() and described.build() == self.on:
                object.__setattr__(self, "on", described)
        known, sizes = self.plan.mesh_axes(), self.sizes
        for axis, size in sizes.items():
            if axis not in known and size != 1:
                raise PlanError(
                    f"Mesh axis {axis!r} (size {size}) is used by no rule of plan "
                    f"{self.plan.name!r}.{did_you_mean(axis, known)}"
                )
        for axis in known - set(sizes) - set(MESH_AXES):
            raise PlanError(
                f"Plan {self.plan.name!r} cuts along {axis!r}, which the mesh "
                f"lacks.{did_you_mean(axis, sizes)}"
            )

    @functools.cached_property
    def mesh(self) -> Mesh:
        return self.on.build() if isinstance(self.on, MeshSpec) else self.on

    @property
    def sizes(self) -> dict[str, int]:
        """Axes of the mesh; -1 where the devices decide."""
        return self.on.sizes if isinstance(self.on, MeshSpec) else dict(self.on.shape)

    def __repr__(self) -> str:
        sizes = ",".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return f"Placement({sizes}, plan {self.plan.name!r})"

    def weight_spec(self, axes: Mapping[str, int]) -> PartitionSpec:
        """How a weight with these axes is cut. One that has `embed` alone, as a norm's, is whole:
        it is small, and what it is multiplied with holds all of that axis.
        """
        if axes.keys() - {"layers"} == {"embed"}:
            return PartitionSpec()
        return self._spec(self.plan.weights, list(axes.items()))

    def weight(self, param: Param) -> NamedSharding:
        return NamedSharding(self.mesh, self.weight_spec(param.axes))

    def activation_spec(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> PartitionSpec:
        """How an activation of this shape with these axis names is cut."""
        return self._spec(self.plan.activations, list(zip(axes, shape, strict=True)))

    def activation(self, shape: tuple[int, ...], axes: tuple[str, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, self.activation_spec(shape, axes))

    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def constrain(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Ask the compiler for this layout of an activation."""
        return jax.lax.with_sharding_constraint(x, self.activation(x.shape, axes))

    def uncut(self, axes: Mapping[str, int]) -> list[str]:
        """Axes that a rule would cut but whose size does not divide: said in words."""
        notes, rules = [], dict(self.plan.weights)
        for axis, size in axes.items():
            ways = math.prod(self.mesh.shape.get(m, 1) for m in rules.get(axis, ()))
            if size % ways:
                notes.append(f"{axis}={size} does not divide by {'*'.join(rules[axis])}={ways}")
        return notes

    def all_uncut(self, abstract: Any) -> list[str]:
        """`uncut` of every weight of an abstract model, each note once."""
        notes = (self.uncut(param.axes) for param in paths(abstract, is_param).values())
        return list(dict.fromkeys(note for each in notes for note in each))

    def _spec(self, rules: Rules, axes: list[tuple[str, int]]) -> PartitionSpec:
        """First come, first served: a mesh axis is used once per array; what does not divide stays
        whole.
        """
        free, targets = dict(self.mesh.shape), dict(rules)
        spec: list[tuple[str, ...] | str | None] = []
        for axis, size in axes:
            taken: list[str] = []
            for mesh_axis in targets.get(axis, ()):
                ways = free.get(mesh_axis, 1) * math.prod(self.mesh.shape[t] for t in taken)
                if free.get(mesh_axis, 1) > 1 and size % ways == 0:
                    taken.append(mesh_axis)
                    del free[mesh_axis]
            spec.append(tuple(taken) if len(taken) > 1 else taken[0] if taken else None)
        return PartitionSpec(*spec)


def placement_on(mesh: Any, plan: str | Plan | None = None) -> Placement | None:
    """A plan on a mesh, each by name or as an object; without a mesh, nothing is placed.

    Raises:
        PlanError: no such plan, or not the devices for the mesh.
    """
    wanted = plan_named(plan)
    if mesh is None:
        return None
    placement = Placement(mesh if isinstance(mesh, MeshSpec | Mesh) else MeshSpec.of(mesh), wanted)
    placement.mesh.size  # noqa: B018  (sizes that do not divide are refused here)
    return placement

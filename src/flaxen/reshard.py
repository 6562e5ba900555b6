"""Move a live model to another mesh, or lay it out by another plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

from flaxen.core.dot import is_leaf_type
from flaxen.core.tree import is_param, paths
from flaxen.families.config import abstract_module
from flaxen.model import Model
from flaxen.models.fold import Folded, folded, stack_params
from flaxen.shard import Placement, Plan, placement_on


def reshard(model: Model, mesh: Any, plan: str | Plan | None = None) -> Model:
    """The same weights on another mesh (None: on one device), cut as the plan says.

    Values do not change; adapters and packed weights move with the weights that they belong to.
    The given model stays usable: let go of it to free the memory of its layout.

    Raises:
        PlanError: no such plan, or not the devices for the mesh.
    """
    placement = placement_on(mesh, plan)
    axes = _axes(model)

    def move(path: str, leaf: Any) -> Any:
        where = _place(placement, axes[path], leaf.shape)
        target = leaf.shardings(where) if is_leaf_type(leaf) else where
        return jax.device_put(leaf, target)

    leaves = {p: move(p, x) for p, x in paths(model.module, is_leaf_type).items()}
    structure = jax.tree.structure(model.module, is_leaf=is_leaf_type)
    module = jax.tree.unflatten(structure, list(leaves.values()))
    runtime = dataclasses.replace(model.runtime, placement=placement)
    return model.replace(module=module, runtime=runtime)


def _axes(model: Model) -> dict[str, tuple[str, ...]]:
    """The names of each weight's axes, by path."""
    abstract, _, _ = abstract_module(model.config)
    if any(isinstance(x, Folded) for x in jax.tree.leaves(model.module, is_leaf=_is_folded)):
        abstract = folded(abstract, stack_params)
    return {path: tuple(param.axes) for path, param in paths(abstract, is_param).items()}


def _place(
    placement: Placement | None, axes: tuple[str, ...], shape: tuple[int, ...]
) -> NamedSharding | SingleDeviceSharding:
    if placement is None:
        return SingleDeviceSharding(jax.devices()[0])
    spec = placement.weight_spec(dict(zip(axes, shape, strict=True)))
    return NamedSharding(placement.mesh, spec)


def _is_folded(x: Any) -> bool:
    return isinstance(x, Folded)

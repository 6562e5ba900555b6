"""Meshes from short descriptions: `fsdp=2,tp=4`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from flaxen.core.errors import PlanError

MESH_AXES = ("dp", "fsdp", "tp", "sp", "ep")
"""Data, fully sharded data, tensor, sequence and expert parallelism."""


def parse_mesh(spec: str | Mapping[str, int] | Sequence[tuple[str, int]]) -> dict[str, int]:
    """Mesh axes and sizes of `fsdp=2,tp=-1`, a dict or pairs; at most one size is -1.

    Raises:
        PlanError: for anything that is not `name=integer`, a repeated axis, a size below 1.
    """
    try:
        pairs = _pairs(spec) if isinstance(spec, str) else list(dict(spec).items())
    except TypeError:
        raise PlanError(f"{spec!r} is no mesh; expected for example 'fsdp=2,tp=4'.") from None
    sizes: dict[str, int] = {}
    for name, size in pairs:
        if name in sizes:
            raise PlanError(f"Mesh axis {name!r} is given twice in {spec!r}.")
        if not isinstance(size, int) or size == 0 or size < -1:
            raise PlanError(
                f"Mesh axis {name!r} has size {size!r}; expected a whole number above 0, or -1 "
                "for 'the rest'."
            )
        sizes[name] = size
    if list(sizes.values()).count(-1) > 1:
        raise PlanError(f"Mesh {spec!r} has more than one -1; only one size can be inferred.")
    if not sizes:
        raise PlanError("The mesh is empty; expected for example 'fsdp=2,tp=4'.")
    return sizes


def _pairs(text: str) -> list[tuple[str, int]]:
    pairs = []
    for piece in filter(None, (p.strip() for p in text.split(","))):
        name, equals, size = piece.partition("=")
        if not equals or not name.strip().isidentifier() or not _is_integer(size):
            raise PlanError(
                f"Cannot read {piece!r} in mesh {text!r}; expected name=size, for example tp=4."
            )
        pairs.append((name.strip(), int(size)))
    return pairs


def _is_integer(text: str) -> bool:
    return text.strip().removeprefix("-").isdigit()


def resolve_sizes(sizes: Mapping[str, int], devices: int) -> dict[str, int]:
    """Fill in the -1 and check the product against the number of devices."""
    known = math.prod(size for size in sizes.values() if size > 0)
    named = ",".join(f"{name}={size}" for name, size in sizes.items())
    if devices % known:
        raise PlanError(
            f"Mesh {named} needs a multiple of {known} devices, and there are {devices}. Choose "
            f"sizes whose product divides {devices}."
        )
    return {name: devices // known if size == -1 else size for name, size in sizes.items()}


def make_mesh(
    spec: str | Mapping[str, int] | Sequence[tuple[str, int]] | Mesh,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A `jax.sharding.Mesh` from a description; it takes the first devices when it needs fewer than
    there are.

    Raises:
        PlanError: when the sizes do not divide the number of devices.
    """
    if isinstance(spec, Mesh):
        return spec
    devices = list(jax.devices() if devices is None else devices)
    sizes = resolve_sizes(parse_mesh(spec), len(devices))
    taken = devices[: math.prod(sizes.values())]
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=taken)

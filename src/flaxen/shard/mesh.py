"""Meshes from short descriptions: `fsdp=2,tp=4`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from flaxen.core.errors import PlanError, did_you_mean

MESH_AXES = ("dp", "fsdp", "tp", "sp", "ep")
"""Data, fully sharded data, tensor, sequence and expert parallelism."""


def parse_mesh(spec: str | Mapping[str, int] | Sequence[tuple[str, int]]) -> dict[str, int]:
    """Mesh axes and sizes of `fsdp=2,tp=-1`, a dict or pairs; at most one size is -1.

    Raises:
        PlanError: for anything that is not `name=integer`, a repeated axis, a size below 1.
    """
    pairs = _pairs(spec) if isinstance(spec, str) else _listed(spec)
    sizes: dict[str, int] = {}
    for name, size in pairs:
        if name in sizes:
            raise PlanError(f"Mesh axis {name!r} is given twice in {spec!r}.")
        if type(size) is not int or size == 0 or size < -1:
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


def _listed(spec: Any) -> list[tuple[str, int]]:
    try:
        pairs = [*spec.items()] if isinstance(spec, Mapping) else [*spec]
        return [(str(name), size) for name, size in pairs]
    except (TypeError, ValueError):
        raise PlanError(f"{spec!r} is no mesh; expected for example 'fsdp=2,tp=4'.") from None


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


@dataclasses.dataclass(frozen=True)
class MeshSpec:
    """A mesh before there are devices: sizes of axes, of which one may be -1 (the rest).

    `axis_dims` is a tuple in the order of `axis_names`, or text or a dict, which are matched by
    name; what they leave out has size 1. backend: whose devices; None is jax's own choice, made
    when the mesh is.

    Raises:
        PlanError: sizes and names that do not fit together.
    """

    axis_dims: tuple[int, ...]
    axis_names: tuple[str, ...]
    backend: str | None

    def __init__(
        self,
        axis_dims: str | Mapping[str, int] | Sequence[int] = (1, -1, 1, 1),
        axis_names: Sequence[str] = MESH_AXES[:4],
        backend: str | None = None,
    ):
        names = (axis_names,) if isinstance(axis_names, str) else axis_names
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise PlanError(f"axis_names is {axis_names!r}; expected names as ('dp', 'fsdp').")
        names = tuple(names)
        if isinstance(axis_dims, str | Mapping):
            given = parse_mesh(axis_dims)
            for name in given:
                if name not in names:
                    raise PlanError(
                        f"axis_dims has an axis {name!r} that axis_names lacks."
                        f"{did_you_mean(name, names)} Add it to axis_names if it is meant."
                    )
            dims = tuple(given.get(name, 1) for name in names)
        elif isinstance(axis_dims, Sequence):
            dims = tuple(axis_dims)
        else:
            raise PlanError(
                f"axis_dims is {axis_dims!r}; expected sizes as (1, -1, 1, 1), 'fsdp=-1' or a dict."
            )
        if len(dims) != len(names):
            raise PlanError(
                f"axis_dims {dims} has {len(dims)} sizes and axis_names {names} {len(names)} "
                "names; expected one size for each name."
            )
        parse_mesh(list(zip(names, dims, strict=True)))
        if backend is not None and not isinstance(backend, str):
            raise PlanError(f"backend is {backend!r}; expected a name such as 'gpu', or None.")
        for field, value in (("axis_dims", dims), ("axis_names", names), ("backend", backend)):
            object.__setattr__(self, field, value)

    @classmethod
    def of(cls, spec: str | Mapping[str, int] | Sequence[tuple[str, int]]) -> MeshSpec:
        """The mesh that has just the axes of `fsdp=2,tp=-1`."""
        sizes = parse_mesh(spec)
        return cls(tuple(sizes.values()), tuple(sizes))

    @property
    def sizes(self) -> dict[str, int]:
        """As they were given, by name."""
        return dict(zip(self.axis_names, self.axis_dims, strict=True))

    def devices(self) -> list[Any]:
        """Those of the backend."""
        try:
            return list(jax.devices(self.backend))
        except RuntimeError as error:
            raise PlanError(
                f"backend {self.backend!r} is not here: {error}. Leave backend out to use "
                f"{jax.default_backend()!r}."
            ) from None

    def get_axis_dims(self) -> tuple[int, ...]:
        """The sizes on the devices that are here."""
        return tuple(resolve_sizes(self.sizes, len(self.devices())).values())

    def build(self) -> Mesh:
        """The mesh itself; nothing is put on its devices."""
        return make_mesh(self.sizes, self.devices())


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

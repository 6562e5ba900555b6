"""A model as a tree of parts: what is in it, how large, and how much of it each device holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flaxen.core.tree import Param, is_param, paths
from flaxen.shard import Placement


@dataclasses.dataclass(frozen=True)
class Part:
    """A part or a weight, with what is below it summed up.

    `name` is a name in the tree, or `{0...29}` for `copies` equal parts next to each other;
    `parameters`, `nbytes` and `device_bytes` count all of them. Only weights have a shape.
    """

    name: str
    parameters: int
    nbytes: int
    device_bytes: int
    copies: int = 1
    shape: tuple[int, ...] | None = None
    axes: tuple[str, ...] | None = None
    dtype: str | None = None
    cut: tuple[str, ...] | None = None
    children: tuple[Part, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON; empty fields are left out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["children"] = [child.as_dict() for child in self.children]
        return {key: value for key, value in fields.items() if value not in (None, [], ())}


def parts(tree: Any, placement: Placement | None = None, name: str = "model") -> Part:
    """The parts of an abstract or a real model.

    A placement tells how abstract weights would be cut; its mesh needs no devices. Real arrays are
    counted as they lie.
    """
    nested: dict[str, Any] = {}
    for path, leaf in paths(tree, is_leaf=is_param).items():
        *above, last = path.split(".")
        node = nested
        for piece in above:
            node = node.setdefault(piece, {})
        node[last] = _weight(last, leaf, placement)
    return _part(name, nested)


def totals(part: Part) -> dict[str, int]:
    """Parameters, bytes of all weights, and bytes on each device."""
    return {
        "parameters": part.parameters,
        "bytes": part.nbytes,
        "bytes_per_device": part.device_bytes,
    }


def _weight(name: str, leaf: Any, placement: Placement | None) -> Part:
    dtype = np.dtype(leaf.dtype or np.float32)
    shard, cut = leaf.shape, None
    if isinstance(leaf, Param):
        if placement is not None:
            sharding = placement.weight(leaf)
            shard, cut = sharding.shard_shape(leaf.shape), _words(sharding.spec)
    elif isinstance(leaf, jax.Array):
        shard = leaf.sharding.shard_shape(leaf.shape)
        cut = _words(getattr(leaf.sharding, "spec", ()))
    return Part(
        name,
        parameters=math.prod(leaf.shape),
        nbytes=math.prod(leaf.shape) * dtype.itemsize,
        device_bytes=math.prod(shard) * dtype.itemsize,
        shape=tuple(leaf.shape),
        axes=tuple(leaf.axes) if isinstance(leaf, Param) else None,
        dtype=dtype.name,
        cut=cut,
    )


def _words(spec: Any) -> tuple[str, ...] | None:
    """What each dimension is cut along, `-` where it is whole; None if nothing is cut."""
    if not any(spec):
        return None
    return tuple(
        "-" if not axes else axes if isinstance(axes, str) else "*".join(axes) for axes in spec
    )


def _part(name: str, below: Mapping[str, Any]) -> Part:
    each = [child if isinstance(child, Part) else _part(key, child) for key, child in below.items()]
    children = _folded(each)
    return Part(
        name,
        parameters=sum(child.parameters for child in children),
        nbytes=sum(child.nbytes for child in children),
        device_bytes=sum(child.device_bytes for child in children),
        children=tuple(children),
    )


def _folded(each: list[Part]) -> list[Part]:
    """Numbered neighbours that are equal but for their number become one part."""
    groups: list[list[Part]] = []
    for part in each:
        if groups and part.name.isdigit() and _alike(groups[-1][0], part):
            groups[-1].append(part)
        else:
            groups.append([part])
    return [_together(group) for group in groups]


def _alike(one: Part, other: Part) -> bool:
    return one.name.isdigit() and dataclasses.replace(other, name=one.name) == one


def _together(group: list[Part]) -> Part:
    first, count = group[0], len(group)
    if count == 1:
        return first
    return dataclasses.replace(
        first,
        name=f"{{{first.name}...{group[-1].name}}}",
        copies=count,
        parameters=first.parameters * count,
        nbytes=first.nbytes * count,
        device_bytes=first.device_bytes * count,
    )

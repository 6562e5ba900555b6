"""Reading a PartitionSpec."""

from __future__ import annotations

import math
from typing import Any

from jax.sharding import AbstractMesh, Mesh


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """One dimension of a PartitionSpec as a tuple."""
    return tuple(entry) if isinstance(entry, tuple) else () if entry is None else (entry,)


def ways(mesh: Mesh | AbstractMesh, entry: Any) -> int:
    """Into how many pieces one dimension is cut; axes that the mesh lacks cut nothing."""
    return math.prod(mesh.shape.get(axis, 1) for axis in mesh_axes(entry))

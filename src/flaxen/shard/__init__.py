"""Where things live: meshes, plans (axis names to mesh axes) and placements."""

from flaxen.shard.host import everywhere, on_host
from flaxen.shard.mesh import MeshSpec, make_mesh, parse_mesh
from flaxen.shard.place import Placement, placement_on
from flaxen.shard.plan import PLANS, Plan, plan_named

__all__ = [
    "PLANS",
    "MeshSpec",
    "Placement",
    "Plan",
    "everywhere",
    "make_mesh",
    "on_host",
    "parse_mesh",
    "placement_on",
    "plan_named",
]

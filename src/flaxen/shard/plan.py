"""Plans: which axis of a weight or an activation is cut along which axis of the mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from flaxen.core.errors import PlanError, did_you_mean
from flaxen.core.registry import Registry

AXES = frozenset(
    {
        "batch",
        "seq",
        "keys",
        "embed",
        "token_embed",
        "heads",
        "kv_heads",
        "group",
        "head_dim",
        "mlp",
        "experts",
        "vocab",
        "positions",
        "layers",
        "rank",
        "state",
        "kernel",
        "types",
        "buckets",
        "features",
        "labels",
        "channels",
        "frames",
        "rows",
        "columns",
        "parts",
    }
)
"""The vocabulary of core/axes.md."""

Rules = tuple[tuple[str, tuple[str, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Axis name -> mesh axis (or several), for weights and for activations; given as dicts, kept
    hashable.

    An axis without a rule is not cut. Rules for mesh axes that a mesh lacks do nothing.

    Raises:
        PlanError: for an axis name that no weight or activation has.
    """

    weights: Rules
    activations: Rules
    name: str = "custom"

    def __init__(
        self,
        weights: Mapping[str, str | tuple[str, ...]] | Rules,
        activations: Mapping[str, str | tuple[str, ...]] | Rules,
        name: str = "custom",
    ):
        for field, rules in (("weights", weights), ("activations", activations)):
            object.__setattr__(self, field, _rules(rules, field))
        object.__setattr__(self, "name", name)

    def mesh_axes(self) -> set[str]:
        """Every mesh axis that some rule speaks of."""
        return {axis for _, axes in self.weights + self.activations for axis in axes}


def _rules(rules: Mapping[str, str | tuple[str, ...]] | Rules, field: str) -> Rules:
    out = []
    for axis, target in dict(rules).items():
        if axis not in AXES:
            raise PlanError(
                f"Plan {field} has a rule for axis {axis!r}, which no array "
                f"has.{did_you_mean(axis, AXES)}"
            )
        targets = (target,) if isinstance(target, str) else target
        odd = not isinstance(targets, tuple | list) or not all(isinstance(t, str) for t in targets)
        if odd or len(set(targets)) < len(targets):
            raise PlanError(
                f"Plan {field} cuts {axis!r} along {target!r}; expected a mesh axis, or several "
                "different ones in a tuple."
            )
        out.append((axis, tuple(targets)))
    return tuple(out)


_TENSOR = {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}
_DATA = {"batch": ("dp", "fsdp"), "seq": "sp", "keys": "sp"}

PLANS: Registry[Plan] = Registry("plan")
PLANS.register("auto", Plan(_TENSOR | {"embed": "fsdp", "experts": "ep"}, _TENSOR | _DATA, "auto"))
PLANS.register("dp", Plan({}, {"batch": ("dp", "fsdp")}, "dp"))
PLANS.register("fsdp", Plan({"embed": "fsdp"}, {"batch": ("dp", "fsdp")}, "fsdp"))
PLANS.register("tp", Plan(_TENSOR, _TENSOR | {"batch": "dp"}, "tp"))
PLANS.register(
    "fsdp_tp", Plan(_TENSOR | {"embed": "fsdp"}, _TENSOR | {"batch": ("dp", "fsdp")}, "fsdp_tp")
)
PLANS.register("sp", Plan({}, _DATA, "sp"))
PLANS.register("ep", Plan({"experts": "ep"}, {"batch": ("dp", "fsdp")}, "ep"))


def plan_named(plan: str | Plan | None) -> Plan:
    """The plan of that name; None means `auto`; a plan is returned as it is."""
    return plan if isinstance(plan, Plan) else PLANS[plan or "auto"]

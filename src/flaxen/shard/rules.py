"""Layouts of weights as (regex, PartitionSpec) pairs."""

from __future__ import annotations

import re
from typing import Any

from jax.sharding import PartitionSpec

from flaxen.core.tree import is_param, paths
from flaxen.shard.place import Placement

PartitionRules = tuple[tuple[str, PartitionSpec], ...]


def partition_rules(abstract: Any, placement: Placement) -> PartitionRules:
    """One rule for each kind of weight of an abstract model, the first that matches counts; what
    lies whole on every device, norms and scalars among it, has an empty spec, and so has what no
    rule names.

    Paths may be written with dots or slashes. Where layers of one name are cut in different ways,
    each has a rule of its own.
    """
    kinds: dict[str, dict[str, PartitionSpec]] = {}
    for path, param in paths(abstract, is_param).items():
        spec = placement.weight_spec(param.axes)
        spec = spec if any(spec) else PartitionSpec()
        kinds.setdefault(_pattern(path, r"\d+"), {})[_pattern(path)] = spec
    rules: list[tuple[str, PartitionSpec]] = []
    for kind, each in kinds.items():
        same = len(set(each.values())) == 1
        rules += [(kind, next(iter(each.values())))] if same else each.items()
    return (*rules, (".*", PartitionSpec()))


def _pattern(path: str, number: str | None = None) -> str:
    pieces = (number if number and p.isdigit() else re.escape(p) for p in path.split("."))
    return r"\b" + "[./]".join(pieces) + "$"

"""Which parts of a model an adapter is put on: by name, by expression, by layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flaxen.core.errors import ConfigError, did_you_mean
from flaxen.core.tree import paths
from flaxen.layers.linear import Embedding, Linear
from flaxen.quantize.fp8 import KEPT

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL_LINEAR = "all-linear"


def matching(tree: Any, targets: str | Sequence[str] | None) -> set[str]:
    """Paths of the projections that the targets mean.

    Raises:
        ConfigError: one means none.
    """
    every = [path for path, x in _parts(tree, Linear).items()]
    kinds = {path.rpartition(".")[2] for path in every}
    if targets is None:
        # A model of states alone has none of the usual ones.
        targets = [name for name in PROJECTIONS if name in kinds] or ALL_LINEAR
    if targets == ALL_LINEAR:
        return {path for path in every if not re.search(KEPT, f"{path}.weight")}
    if isinstance(targets, str):
        return _matching_pattern(every, targets)
    wrong = [target for target in targets if target not in kinds]
    if wrong:
        words = " ".join(f"{t!r} matches no projection.{did_you_mean(t, kinds)}" for t in wrong)
        raise ConfigError(f"Cannot add adapters: {words}")
    return {path for path in every if path.rpartition(".")[2] in targets}


def _matching_pattern(every: list[str], pattern: str) -> set[str]:
    expression = compiled(pattern, "targets")
    found = {path for path in every if expression.fullmatch(path)}
    if not found:
        raise ConfigError(
            f"The expression {pattern!r} matches the whole path of no projection."
            f"{did_you_mean(pattern, every)}"
        )
    return found


def compiled(pattern: str, what: str) -> re.Pattern[str]:
    """
    Raises:
        ConfigError: it is no regular expression.
    """
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(f"{what} {pattern!r} is no regular expression: {error}.") from error


def pattern_value(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """The value of the first expression that the name ends with, as whole words; PEFT's rule."""
    for pattern, value in (patterns or {}).items():
        if compiled(rf"(?:.*\.)?(?:{pattern})$", "A pattern").match(name):
            return value
    return default


def check_patterns(patterns: Iterable[str], adapted: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: one ends the path of no projection that gets an adapter.
    """
    for pattern in patterns:
        if not any(pattern_value({pattern: True}, path, False) for path in adapted):
            raise ConfigError(
                f"The pattern {pattern!r} ends the path of no projection that gets an adapter."
                f"{did_you_mean(pattern, {path.rpartition('.')[2] for path in adapted})}"
            )


def check_layers(wanted: Iterable[int], adapted: Iterable[str]) -> None:
    """
    Raises:
        ConfigError: there is no such layer, or nothing of it gets an adapter.
    """
    there = {layer_of(path) for path in adapted}
    absent = [layer for layer in wanted if layer not in there]
    if absent:
        known = sorted(layer for layer in there if layer is not None)
        raise ConfigError(
            f"layers_to_transform names layer {absent[0]}, where no projection would get an "
            f"adapter; those that do are in the layers {', '.join(map(str, known)) or 'none'}."
        )


def layer_of(path: str) -> int | None:
    """The number of the layer that a path goes through: the first number in it."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(found[1]) if found else None


def saved_modules(tree: Any, wanted: Iterable[str]) -> list[str]:
    """Paths of the heads and tables that are to be trained in full.

    Raises:
        ConfigError: a name of none, or of one that another part shares or that has a bias.
    """
    parts = _parts(tree, (Linear, Embedding))
    ties = tree.ties() if hasattr(tree, "ties") else {}
    shared = {x.removesuffix(".weight") for pair in ties.items() for x in pair}
    found = []
    for name in wanted:
        here = [path for path in parts if path == name or path.endswith(f".{name}")]
        tied = [path for path in shared if path == name or path.endswith(f".{name}")]
        if tied:
            raise ConfigError(
                f"{tied[0]} shares its weight with another part of this model, so it cannot be "
                "trained in full alone. Leave it out of modules_to_save."
            )
        if not here:
            raise ConfigError(
                f"modules_to_save: there is no head or table {name!r}.{did_you_mean(name, parts)}"
            )
        if any(parts[path].bias is not None for path in here):
            raise ConfigError(f"modules_to_save: {here[0]} has a bias, which would be left out.")
        found += here
    return found


def _parts(tree: Any, kind: Any) -> dict[str, Any]:
    found = paths(tree, is_leaf=lambda x: isinstance(x, kind)).items()
    return {path: x for path, x in found if isinstance(x, kind)}

"""Adapter folders in the format of the PEFT library, read onto a model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from flaxen.convert.lazy import LazyTensor
from flaxen.convert.relation import Relation, Row, renamer
from flaxen.core.errors import CheckpointError
from flaxen.layers.linear import Linear
from flaxen.models.fold import in_body, plain_paths
from flaxen.tune.config import CONFIG, PREFIX, WEIGHTS, Config, read_adapter
from flaxen.tune.leaf import DEFAULT
from flaxen.tune.lora import (
    check_new,
    map_linears,
    norms,
    replaced,
    with_adapter,
    with_magnitude,
)
from flaxen.tune.modules import Module, Names, check_apart, modules, whole_rows
from flaxen.tune.saving import save_adapter

__all__ = ["CONFIG", "WEIGHTS", "check_apart", "load_adapter", "save_adapter"]

A, B, M = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


@dataclasses.dataclass(frozen=True)
class Part:
    """What a folder holds for one projection of one layer: a (rank, in...), b (out..., rank), with
    DoRA magnitude (out...).
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None


def load_adapter(
    tree: Any, folder: str | os.PathLike[str], names: Names, *, name: str = DEFAULT
) -> Any:
    """The model with the adapters of a PEFT folder, under a name that tells them from others.

    names: the relation of the model (`flaxen.adapter.relation_of`), or its family's table, with
    which adapters of fused tensors find no place. Several of our projections that are one module of
    the checkpoint share its A, and each gets its rows of B. A layer without an adapter inside a
    folded model gets zeros.

    Raises:
        CheckpointError: files that are absent or damaged, or tensors that do not fit the model.
        ConfigError: a kind of adapter that would compute something else here, or a model that has
            an adapter of this name.
    """
    check_new(tree, name)
    config, left = read_adapter(Path(folder))
    problems: list[str] = []
    parts = _parts(tree, config, left, names, problems)
    whole = {
        path: jnp.asarray(row.load({key: tensor})[f"{path}.weight"].read())
        for key, (row, tensor) in whole_weights(tree, left, names, problems).items()
        for path in [next(iter(row.parts.values()))[0].removesuffix(".weight")]
    }
    raise_problems(folder, problems, left)
    folded, plain = in_body(tree), plain_paths(tree)

    def adapt(path: str, layer: Linear) -> Linear:
        mine = [parts.get(each) for each in plain(path)]
        there = [part for part in mine if part is not None]
        if not there:
            return layer
        return _adapted(layer, mine, there, folded(path), name=name, dropout=config.lora_dropout)

    return replaced(map_linears(adapt, tree), whole, name)


def _parts(
    tree: Any, config: Config, left: dict[str, LazyTensor], names: Names, problems: list[str]
) -> dict[str, Part]:
    """What is there for each projection by its path in the model that is not folded; taken out of
    `left`.
    """
    out: dict[str, Part] = {}
    for module in modules(tree, names):
        found = {key: left.pop(f"{module.name}.{key}", None) for key in (A, B, M)}
        found[M] = left.pop(f"{module.name}.{M}.weight", found[M])
        if not any(x is not None for x in found.values()):
            continue
        bad = misfits(module, config, found)
        problems += bad
        if not bad:
            out |= _split(module, config, {k: x for k, x in found.items() if x is not None})
    return out


def misfits(module: Module, config: Config, found: Mapping[str, LazyTensor | None]) -> list[str]:
    """What is wrong with the tensors of a module."""
    rank, (outs, ins), name = config.rank(module.name), module.sizes, PREFIX + module.name
    if found[A] is None or found[B] is None:
        return [f"{name} has only one of lora_A and lora_B"]
    if (found[M] is not None) != config.use_dora:
        has = "a" if found[M] is not None else "no"
        return [f"{name} has {has} {M}, and its config says use_dora={config.use_dora}"]
    fitting = {A: (rank, ins), B: (outs, rank), M: (outs,)}
    return [
        f"{name}.{key.removesuffix('.weight')} is {x.shape}, expected {fitting[key]}"
        for key, x in found.items()
        if x is not None and x.shape != fitting[key]
    ]


def _split(module: Module, config: Config, found: Mapping[str, LazyTensor]) -> dict[str, Part]:
    wide = {key: x.read().astype(np.float32) for key, x in found.items()}
    a, b = module.split_a(wide[A]), module.split_b(wide[B])
    m = module.split_magnitude(wide[M]) if M in wide else {}
    scale = config.scale(module.name)
    return {module.path(x): Part(a[x], b[x], scale, m.get(x)) for x in module.labels}


def _adapted(
    layer: Linear, mine: Sequence[Part | None], there: Sequence[Part], folded: bool, **about: Any
) -> Linear:
    """The projection with its parts; ranks of stacked layers are made equal with zeros, scales by
    what `b` is multiplied with.
    """
    first, rank = there[0], max(len(part.a) for part in there)
    scale = max((part.scale for part in there), key=abs)
    a = np.zeros((len(mine), rank, *first.a.shape[1:]), np.float32)
    b = np.zeros((len(mine), *first.b.shape[:-1], rank), np.float32)
    for i, part in enumerate(mine):
        if part is not None:
            a[i, : len(part.a)] = part.a
            factor = np.float32(part.scale / scale) if scale else np.float32(1)
            b[i, ..., : len(part.a)] = part.b * factor
    a, b = (a, b) if folded else (a[0], b[0])
    layer = with_adapter(layer, a, b, scale, **about)
    if first.magnitude is None:
        return layer
    lengths = list(np.asarray(norms(layer)).reshape(len(mine), *first.magnitude.shape))
    pairs = zip(mine, lengths, strict=True)
    given = [old if x is None or x.magnitude is None else x.magnitude for x, old in pairs]
    return with_magnitude(layer, np.stack(given) if folded else given[0])


def raise_problems(
    folder: str | os.PathLike[str], problems: Sequence[str], left: Mapping[str, Any]
) -> None:
    """
    Raises:
        CheckpointError: there are problems, or tensors that no part of the model took.
    """
    problems = [*problems, *(f"the model has no place for {PREFIX}{key}" for key in sorted(left))]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"The adapter in {folder} does not fit this model: {'; '.join(problems[:5])}{more}."
        )


def whole_weights(
    tree: Any, left: dict[str, LazyTensor], names: Names, problems: list[str]
) -> dict[str, tuple[Row, LazyTensor]]:
    """Heads and tables that were trained in full, by their names in the checkpoint; taken out of
    `left`.
    """
    rows = whole_rows(tree, names)
    ties = tree.ties() if hasattr(tree, "ties") else {}
    problems += _tied(rows, ties, left, names)
    found = {key: (row, left.pop(key)) for key, row in rows.items() if key in left}
    problems += [
        f"{PREFIX}{key} is {tensor.shape}, expected {row.shape}"
        for key, (row, tensor) in found.items()
        if tensor.shape != row.shape
    ]
    return found if not problems else {}


def _tied(
    rows: Mapping[str, Row], ties: Mapping[str, str], left: dict[str, LazyTensor], names: Names
) -> list[str]:
    """Weights that are one here have to be equal in the folder; one of them is taken out."""
    by_path = {path: key for key, row in rows.items() for path, _ in row.parts.values()}
    rename = (lambda path: path) if isinstance(names, Relation) else renamer(names)
    problems = []
    for alias, source in ties.items():
        one, other = by_path.get(source), rename(alias)
        a, b = left.get(one or ""), left.get(other)
        if a is None and b is None:
            continue
        if a is None or b is None or not np.array_equal(a.read(), b.read()):
            problems.append(f"{one} and {other} are one weight in it, and the folder changes one")
        left.pop(other, None)
    return problems

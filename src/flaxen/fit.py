"""Fit a checkpoint to the abstract model of its config; no weight is read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from flaxen.convert.formats.checkpoint import Checkpoint
from flaxen.convert.lazy import LazyTensor
from flaxen.convert.load import match
from flaxen.convert.relation import Relation, relate
from flaxen.convert.report import Report
from flaxen.core.errors import CheckpointError
from flaxen.families.config import abstract_module, hf_config


@dataclasses.dataclass(frozen=True)
class Fit:
    """A checkpoint beside the model that its config describes.

    `module` is abstract; `weights` holds lazy tensors by path, without those that do not fit.
    """

    module: Any
    relation: Relation
    weights: dict[str, LazyTensor]
    report: Report

    @cached_property
    def names(self) -> dict[str, str]:
        """Under which name each of our weights stands in the file: the first, if stacked."""
        return {row.path: row.names[0] for row in self.relation.table()}

    def tensors(self) -> dict[str, LazyTensor]:
        """The checkpoint as the model would save it: under the hub's names and layouts."""
        return hub_layout(self.relation, self.weights, self.report)


def fit(checkpoint: Checkpoint, key_mapping: Mapping[str, str] | None = None) -> Fit:
    """Find out which tensor is which weight.

    Raises:
        ConfigError: the config is of no family here, or says what the family does not handle.
        CheckpointError: a `key_mapping` that cannot be applied.
    """
    module, family, reading = abstract_module(hf_config(checkpoint.config))
    relation = relate(module, family.names)
    weights, report = match(relation, _renamed(checkpoint, key_mapping), _tied(module, relation))
    report = dataclasses.replace(report, unread=list(reading.unread()))
    return Fit(module, relation, weights, report)


def hub_layout(
    relation: Relation, weights: Mapping[str, LazyTensor], report: Report
) -> dict[str, LazyTensor]:
    """A model's weights under the hub's names, with the tied ones that its file held as well."""
    out = relation.save(weights)
    for target in report.doubled:
        out[target] = out[report.tied[target]]
    return out


def _renamed(
    checkpoint: Checkpoint, key_mapping: Mapping[str, str] | None
) -> Mapping[str, LazyTensor]:
    """The checkpoint under the names that `key_mapping` makes; every pattern in turn."""
    if not key_mapping:
        return checkpoint
    out: dict[str, LazyTensor] = {}
    for key in checkpoint:
        name = key
        for pattern, replacement in key_mapping.items():
            try:
                name = re.sub(pattern, replacement, name)
            except re.error as error:
                raise CheckpointError(
                    f"key_mapping: {pattern!r} -> {replacement!r} is no regular expression and "
                    f"replacement ({error})."
                ) from error
        if name in out:
            raise CheckpointError(
                f"key_mapping gives two tensors the name {name!r}; one is {key!r}."
            )
        out[name] = checkpoint[key]
    return out


def _tied(module: Any, relation: Relation) -> dict[str, str]:
    """Hub names of weights that share another's tensor: a head tied to the embeddings."""
    if module.lm_head is not None:
        return {}
    row = next(row for row in relation.table() if row.path == "embed_tokens.weight")
    return {"lm_head.weight": row.names[0]}

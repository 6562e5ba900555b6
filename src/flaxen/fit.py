"""Fit a checkpoint to the abstract model of its config; no weight is read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from flaxen.convert.formats.checkpoint import Checkpoint
from flaxen.convert.lazy import LazyTensor
from flaxen.convert.load import Match, match
from flaxen.convert.relation import Relation, Row, relate, renamer
from flaxen.convert.report import Report
from flaxen.convert.transforms import LEGACY, Applied, WeightTransform, renamings, transforms_of
from flaxen.core.errors import CheckpointError, ConfigError
from flaxen.families.config import abstract_module, hf_config
from flaxen.families.family import Family, Names


@dataclasses.dataclass(frozen=True)
class Fit:
    """A checkpoint beside the model that its config describes.

    `module` is abstract; `weights` holds lazy tensors by path, without those that do not fit;
    `applied` is what the names and layouts of the file went through on the way; `partial` are the
    tensors that do fit of weights that others lack, such as an expert.
    """

    module: Any
    relation: Relation
    weights: dict[str, LazyTensor]
    report: Report
    applied: Applied
    partial: list[tuple[Row, dict[str, LazyTensor]]]

    @cached_property
    def names(self) -> dict[str, str]:
        """Under which name each of our weights stands in the file: the first, if stacked."""
        return {row.path: row.names[0] for row in self.relation.table()}

    @cached_property
    def sources(self) -> dict[str, tuple[str, ...]]:
        """The keys of the checkpoint behind each tensor that the model wants."""
        plain = {name: (key,) for name, key in self.applied.names.items()}
        for done in self.applied.conversions:
            keys = tuple(key for found in done.sources.values() for key in found)
            plain |= {name: keys for names in done.targets.values() for name in names}
        return plain

    def tensors(self) -> dict[str, LazyTensor]:
        """The checkpoint as the model would save it: under the hub's names and layouts."""
        return hub_layout(self.relation, self.weights, self.report)


def fit(checkpoint: Checkpoint, key_mapping: Mapping[str, str] | None = None) -> Fit:
    """Find out which tensor is which weight.

    Raises:
        ConfigError: the config is of no family here, or says what the family does not handle.
        CheckpointError: a `key_mapping` that cannot be applied.
    """
    config = hf_config(checkpoint.config)
    module, family, reading = abstract_module(config)
    transforms = _transforms(checkpoint, family, key_mapping)

    def matched(module: Any) -> tuple[Relation, Match]:
        names = family.names_of(module)
        relation = relate(module, names)
        return relation, match(
            relation,
            checkpoint,
            transforms,
            tied=_tied(module, relation, names),
            config=config,
            base_prefix=family.base_prefix,
            buffers=family.buffers,
            spare="|".join([family.spare, *_lacking(module, names)]),
            optional=family.optional,
        )

    relation, found = matched(module)
    apart = module.untied() if found.report.untied else None
    if apart is not None:
        # Some configs cannot say that a head is its own: the file does, which holds both.
        module = apart
        relation, found = matched(module)
    weights, report, applied, partial = found
    report = dataclasses.replace(report, unread=list(reading.unread()))
    if checkpoint.format == "torch":
        # There a shared tensor has all of its names, and takes no room for them.
        report.doubled.clear()
    return Fit(module, relation, weights, report, applied, partial)


def hub_layout(
    relation: Relation, weights: Mapping[str, LazyTensor], report: Report
) -> dict[str, LazyTensor]:
    """A model's weights under the hub's names, with the tied ones that its file held as well, and
    without those zeros that it did not hold.
    """
    out = relation.save(weights)
    for name in report.absent:
        if name in out and not out[name].read().any():
            del out[name]
    for target in report.doubled:
        out[target] = out[report.tied[target]]
    return out


def _transforms(
    checkpoint: Checkpoint, family: Family, key_mapping: Mapping[str, str] | None
) -> list[WeightTransform]:
    """The user's renamings, what is registered for the class or model type, the family's, and what
    everything was once called.
    """
    pairs = key_mapping.items() if isinstance(key_mapping, Mapping) else [[key_mapping]]
    if key_mapping and not all(isinstance(text, str) for pair in pairs for text in pair):
        raise CheckpointError(f"key_mapping is {key_mapping!r:.80}; give a dict {{regex: text}}.")
    for name in (key_mapping or {}).values():
        if re.search(r"\\[2-9]", name):
            raise CheckpointError(
                f"key_mapping: {name!r} asks for more than \\1; a pattern may have one group."
            )
    try:
        mine = renamings(key_mapping or {})
    except ConfigError as error:
        raise CheckpointError(f"key_mapping: {error}") from error
    config = checkpoint.config
    class_name = next(iter(config.get("architectures") or []), "")
    registered = transforms_of([("", class_name, config.get("model_type"))])
    return [*mine, *registered, *family.transforms, *LEGACY]


def _lacking(module: Any, names: Names) -> list[str]:
    """How the names begin of what files of other models of the family hold besides."""
    rename = renamer(names)
    return [re.escape(rename(f"{part}.weight").removesuffix("weight")) for part in module.lacks()]


def _tied(module: Any, relation: Relation, names: Names) -> dict[str, str]:
    """Hub names of weights that share another's tensor, such as a head tied to the embeddings."""
    rename = renamer(names)
    stored = {row.path: row.names[0] for row in relation.table()}
    named = {rename(p): stored.get(source, rename(source)) for p, source in module.ties().items()}
    # Some files have one name for both.
    return {name: source for name, source in named.items() if name != source}

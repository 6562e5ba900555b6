"""Looking at data before it is learned from: one record as tokens."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from flaxen.core.errors import InputError
from flaxen.layers.cross_entropy import IGNORED
from flaxen.train.data.batches import Batches
from flaxen.train.data.parts import Part
from flaxen.train.data.prompts import Prompts
from flaxen.train.data.records import Record, found_in
from flaxen.train.data.rows import RowBatches
from flaxen.train.objectives import Objective


@dataclasses.dataclass(frozen=True)
class Shown:
    """Tokens of one row, and which of them something is learned from; or a number."""

    name: str
    ids: np.ndarray
    learned: np.ndarray


def record_at(parts: Sequence[Part], kinds: Sequence[str], index: int) -> Record:
    """Record 0, 1, ... of the data; what comes before is not checked.

    Raises:
        InputError: there are fewer, or it is bad.
    """
    count = 0
    for where, found in itertools.islice(found_in(parts, kinds, streaming=True), index + 1):
        count += 1
        if count == index + 1:
            if isinstance(found, str):
                raise InputError(f"{where}: {found}.")
            return Record(where, found)
    raise InputError(f"There are {count} records, numbered from 0; none is number {index}.")


def shown(objective: Objective, tok: Any, record: Record) -> tuple[list[Shown], dict[str, int]]:
    """What an objective makes of a record: its rows of tokens, and its numbers by name.

    Raises:
        InputError: for a record that it cannot learn from.
    """
    source = objective.source(tok, [record], 1)
    if isinstance(source, Batches):
        rows = [source.parts[0][i][0] for i in range(len(source.parts[0]))]
        names = ["tokens"] if len(rows) == 1 else [f"row {i}" for i in range(len(rows))]
        return [
            # Nothing comes before the first token that could predict it.
            Shown(name, e.ids, (e.labels != IGNORED) & (np.arange(len(e.ids)) > 0))
            for name, e in zip(names, rows, strict=True)
        ], {}
    if isinstance(source, Prompts):
        ids = np.asarray(source.asked[0].ids, np.int32)
        return [Shown("prompt", ids, np.zeros(len(ids), bool))], {}
    source = getattr(source, "whole", source)
    if not isinstance(source, RowBatches):
        raise InputError(f"The objective {objective.config.objective!r} has no rows to show.")
    row = source.compose(source.rows[:1])[0]
    numbers = {key: value.item() for key, value in row.items() if value.ndim == 0}
    return [
        Shown(key, value, _learned(row, key, len(value)))
        for key, value in row.items()
        if value.ndim == 1 and "ids" in key and not key.startswith("kl_")
    ], numbers


def _learned(row: Any, key: str, length: int) -> np.ndarray:
    """By the targets at the slots before, or the mask of what may be hidden; else all."""
    targets = row.get(key.replace("ids", "targets"))
    if targets is not None:
        return np.concatenate([[False], targets[:-1] != IGNORED])
    return row["plain"] > 0 if "plain" in row else np.ones(length, bool)

"""Data as it is asked for, made the batches of an objective."""

from __future__ import annotations

from typing import Any

from flaxen.train.data.parts import parts_of, weights_of
from flaxen.train.data.records import Records
from flaxen.train.objectives import Objective, Source
from flaxen.train.settings import Paths


def learned_from(objective: Objective, tok: Any, data: Paths) -> Source:
    """
    Raises:
        InputError: data that is not there, or cannot be learned from.
    """
    config, kinds = objective.config, objective.kinds
    parts = parts_of(data, config.columns)
    if config.streaming:
        return objective.stream(tok, parts, config.accumulation)
    weights = weights_of(parts)
    if weights is None:
        return objective.source(tok, Records(parts, kinds), config.accumulation)
    first, *others = (
        objective.source(tok, Records((part,), kinds), config.accumulation) for part in parts
    )
    return first.mixed(others, weights)


def tested_on(objective: Objective, tok: Any, data: Paths) -> Source:
    """All of the data, once: there are no weights, and it is read whole.

    Raises:
        InputError: data that is not there, or cannot be learned from.
    """
    parts = parts_of(data, objective.config.columns)
    return objective.held_out(tok, Records(parts, objective.kinds))

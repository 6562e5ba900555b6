"""Settings that nothing would read: they are refused, so that nobody waits for what they ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from flaxen.train.settings.field import plain
from flaxen.train.settings.objective import ObjectiveSettings
from flaxen.train.settings.policy import PolicySettings

OF_OBJECTIVES = {*ObjectiveSettings.__dataclass_fields__, *PolicySettings.__dataclass_fields__}
OF_OBJECTIVES |= {"train_on", "overlong", "label_smoothing", "z_loss", "neftune_alpha"}
OF_OBJECTIVES |= {"reference", "reward"}
OF_OBJECTIVES -= {"objective"}
"""What some objectives read and others do not, as `Objective.reads` says."""


def unread(settings: Any) -> Iterator[str]:
    """What is given for another objective than that of the run."""
    from flaxen.train.objectives import OBJECTIVES

    name = settings.objective
    reads = OBJECTIVES[name].reads if name in OBJECTIVES else None
    if reads is None:
        return
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name not in OF_OBJECTIVES or field.name in reads:
            continue
        if plain(value) != plain(field.default):
            readers = [x for x, each in OBJECTIVES.items() if field.name in (each.reads or ())]
            yield (
                f"{field.name} is {plain(value)!r}, which the objective {name!r} does not read, "
                f"only {', '.join(readers)}"
            )

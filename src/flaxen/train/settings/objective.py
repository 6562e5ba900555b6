"""What is minimised."""

from __future__ import annotations

import dataclasses

from flaxen.train.settings.field import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """`objective` is one of `train.objectives.OBJECTIVES`."""

    objective: str = setting("causal", "What is minimised.")

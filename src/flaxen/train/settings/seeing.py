"""What a run tells while it goes."""

from __future__ import annotations

import dataclasses

from flaxen.train.settings.field import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeeingSettings:
    """`eval_every` 0 evaluates before and after."""

    eval_every: int = setting(
        0, "Steps between evaluations; 0: before and after.", least=0, free=True
    )
    progress: bool = setting(True, "A bar on the terminal.", free=True, flag=False)

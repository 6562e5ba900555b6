"""Checkpoints of a run."""

from __future__ import annotations

import dataclasses

from flaxen.train.settings.field import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavingSettings:
    """`resume` goes on from the last checkpoint in `output`, if there is one."""

    save_every: int = setting(0, "Steps between checkpoints; 0: only the last.", least=0, free=True)
    keep: int = setting(2, "Newest checkpoints that stay; 0: all.", least=0, free=True)
    keep_best: int = setting(
        0, "Checkpoints of the least loss on held-out data that stay besides.", least=0, free=True
    )
    resume: bool = setting(False, "Go on from the last checkpoint.", free=True)

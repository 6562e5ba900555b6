"""Training: data, objectives, the compiled step, the loop, checkpoints."""

from __future__ import annotations

from flaxen.train.objectives import OBJECTIVES, Objective
from flaxen.train.optim import OPTIMIZERS, SCHEDULES
from flaxen.train.run.loop import train
from flaxen.train.run.result import Result
from flaxen.train.settings import TrainConfig

__all__ = [
    "OBJECTIVES",
    "OPTIMIZERS",
    "SCHEDULES",
    "Objective",
    "Result",
    "TrainConfig",
    "train",
]

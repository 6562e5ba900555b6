"""Fine-tuning: data, the compiled step, the loop, checkpoints."""

from __future__ import annotations

from flaxen.train.config import TrainConfig
from flaxen.train.loop import Result, train
from flaxen.train.optim import OPTIMIZERS, SCHEDULES

__all__ = ["OPTIMIZERS", "SCHEDULES", "Result", "TrainConfig", "train"]

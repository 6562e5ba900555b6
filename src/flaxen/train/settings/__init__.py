"""What a run is told."""

from __future__ import annotations

from flaxen.train.settings.training import GROUPS, Paths, TrainConfig

__all__ = ["GROUPS", "Paths", "TrainConfig"]

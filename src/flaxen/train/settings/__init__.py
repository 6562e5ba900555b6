"""What a run is told."""

from __future__ import annotations

from flaxen.train.settings.run_config import RunConfig, run_config
from flaxen.train.settings.training import GROUPS, Paths, TrainConfig
from flaxen.train.settings.yaml_file import as_yaml, read_yaml

__all__ = ["GROUPS", "Paths", "RunConfig", "TrainConfig", "as_yaml", "read_yaml", "run_config"]

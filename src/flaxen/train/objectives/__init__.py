"""What a run minimises, by name."""

from __future__ import annotations

from flaxen.core.registry import Registry
from flaxen.train.objectives.causal import Causal
from flaxen.train.objectives.objective import Batch, Metrics, Objective, Source

OBJECTIVES: Registry[type[Objective]] = Registry("objective")
OBJECTIVES.register("causal", Causal)

__all__ = ["OBJECTIVES", "Batch", "Metrics", "Objective", "Source"]

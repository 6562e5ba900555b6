"""What a run minimises, by name."""

from __future__ import annotations

from flaxen.core.registry import Registry
from flaxen.train.objectives.causal import Causal
from flaxen.train.objectives.classification import Classification, Reward
from flaxen.train.objectives.distillation import Distillation
from flaxen.train.objectives.dpo import Dpo, Ipo
from flaxen.train.objectives.embedding import Embedding
from flaxen.train.objectives.kto import Kto
from flaxen.train.objectives.masked import Masked
from flaxen.train.objectives.objective import Batch, Metrics, Objective, Source
from flaxen.train.objectives.reference_free import Cpo, Orpo, Simpo

OBJECTIVES: Registry[type[Objective]] = Registry("objective")
for _name, _objective in {
    "causal": Causal,
    "dpo": Dpo,
    "ipo": Ipo,
    "kto": Kto,
    "simpo": Simpo,
    "cpo": Cpo,
    "orpo": Orpo,
    "reward": Reward,
    "classification": Classification,
    "distillation": Distillation,
    "embedding": Embedding,
    "masked": Masked,
}.items():
    OBJECTIVES.register(_name, _objective)

__all__ = ["OBJECTIVES", "Batch", "Metrics", "Objective", "Source"]

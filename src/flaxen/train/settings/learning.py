"""How weights move."""

from __future__ import annotations

import dataclasses

from flaxen.train.settings.field import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """`steps` wins over `epochs`. Trained weights and moments are float32 whatever `dtype` is."""

    steps: int | None = setting(None, "Optimiser steps; wins over epochs.", least=1)
    epochs: float = setting(1.0, "Passes over the data.", above=0)
    optimizer: str = setting("adamw", "How a gradient becomes a direction.")
    learning_rate: float = setting(1e-4, "The greatest.", least=0)
    schedule: str = setting("cosine", "How the learning rate falls.")
    warmup: int = setting(0, "Steps until the full learning rate.", least=0)
    weight_decay: float = setting(0.0, "On matrices only.", least=0)
    beta1: float = setting(0.9, "Of the first moment.", least=0, most=1)
    beta2: float = setting(0.999, "Of the second moment.", least=0, most=1)
    eps: float = setting(1e-8, "Added to the root of the second moment.", above=0)
    clip: float | None = setting(1.0, "Longer gradients are shortened to this norm.", above=0)
    dtype: str | None = setting(
        None,
        "What forward and backward compute in; default: as the weights are.",
        choices=("float32", "bfloat16"),
    )

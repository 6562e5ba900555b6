"""How weights move."""

from __future__ import annotations

import dataclasses

from flaxen.train.settings.field import names_in, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """`steps` wins over `epochs`. Trained weights and moments are float32 whatever `dtype` is.

    NEFTune: https://arxiv.org/abs/2310.05914; z-loss: https://arxiv.org/abs/2204.02311.
    """

    steps: int | None = setting(None, "Optimiser steps; wins over epochs.", least=1, free=True)
    epochs: float = setting(1.0, "Passes over the data.", above=0, free=True)
    optimizer: str = setting(
        "adamw",
        "How a gradient becomes a direction.",
        choices=names_in("flaxen.train.optim:OPTIMIZERS"),
    )
    learning_rate: float = setting(
        1e-4, "The greatest. Command line: 2e-4 for adapters, 1e-5 with --full.", least=0
    )
    schedule: str = setting(
        "cosine",
        "How the learning rate falls.",
        choices=names_in("flaxen.train.optim:SCHEDULES"),
    )
    warmup: int = setting(0, "Steps until the full learning rate.", least=0)
    end_ratio: float = setting(0.0, "Of the learning rate, left at the end.", least=0, most=1)
    decay_share: float = setting(0.1, "Of the steps, in which wsd falls.", above=0, most=1)
    weight_decay: float = setting(0.0, "On matrices only.", least=0)
    beta1: float = setting(0.9, "Of the first moment.", least=0, below=1)
    beta2: float = setting(0.999, "Of the second moment.", least=0, below=1)
    eps: float = setting(1e-8, "Added to the root of the second moment.", above=0)
    clip: float | None = setting(1.0, "Longer gradients are shortened to this norm.", above=0)
    dtype: str | None = setting(
        None,
        "What forward and backward compute in; default: as the weights are.",
        choices=("float32", "bfloat16", "float16"),
    )
    loss_scale: float | None = setting(
        None,
        "Gradients are computed this much larger, halved when they overflow: for float16.",
        above=0,
    )
    label_smoothing: float = setting(
        0.0, "Of a target's probability, given to all tokens alike.", least=0, most=1
    )
    z_loss: float = setting(0.0, "Times the squared logarithm of the softmax's sum.", least=0)
    neftune_alpha: float = setting(
        0.0, "Noise on embeddings, by NEFTune's measure; 5 to 15 is usual.", least=0
    )
    patience: int = setting(
        10,
        "Steps in a row with a gradient that is not finite before a run ends.",
        least=1,
        free=True,
    )

"""Batches with few and many targets, and steps on them."""

from __future__ import annotations

import numpy as np

from flaxen.train.settings import TrainConfig
from flaxen.train.step import make_trainer, place_batch

STEPS, ROWS, T = 20, 8, 12
SETTINGS = TrainConfig(
    output="unused",
    learning_rate=1e-2,
    warmup=3,
    weight_decay=0.1,
    clip=0.5,
    beta2=0.95,
    eps=1e-4,
)


def labelled(step: int) -> tuple[np.ndarray, np.ndarray]:
    """ids and unshifted labels (ROWS, T); row r has r + 1 targets, so micro-batches are uneven."""
    ids = np.random.default_rng(step).integers(3, 90, (ROWS, T)).astype(np.int32)
    labels = np.where(np.arange(T) <= np.arange(ROWS)[:, None] + 1, ids, -100)
    labels[:, 0] = -100
    return ids, labels.astype(np.int32)


def batch_of(ids: np.ndarray, labels: np.ndarray, accumulation: int = 1) -> dict[str, np.ndarray]:
    targets = np.pad(labels[:, 1:], [(0, 0), (0, 1)], constant_values=-100)
    return {
        "ids": ids.reshape(accumulation, -1, ids.shape[1]),
        "targets": targets.reshape(accumulation, -1, ids.shape[1]),
    }


def take_steps(model, config, batches, steps=STEPS):
    trainer, state = make_trainer(model.module, model.runtime, config, steps)
    rows = []
    for batch in batches:
        state, metrics = trainer.step(state, trainer.frozen, place_batch(batch, model.runtime))
        rows.append({key: float(value) for key, value in metrics.items()})
    return state, rows

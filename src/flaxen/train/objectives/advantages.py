"""From rewards to what each token counts, on the host in float64.

Sources: GRPO, https://arxiv.org/abs/2402.03300; Dr. GRPO, https://arxiv.org/abs/2503.20783; DAPO,
https://arxiv.org/abs/2503.14476.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flaxen.core.registry import Registry

EPS = 1e-4
"""Added to standard deviations."""


def combined(table: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """(rows, functions) -> the weighted sum of each row's rewards; NaN is none, and where there is
    none at all the sum is NaN too.
    """
    scored = ~np.isnan(table)
    total = np.where(scored, table * np.asarray(weights, np.float64), 0).sum(-1)
    return np.where(scored.any(-1), total, np.nan)


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (of a sample) along the last axis, without NaN: (..., 1). The
    deviation of fewer than two numbers is 0, and the mean of none NaN.
    """
    known = ~np.isnan(x)
    count = known.sum(-1, keepdims=True)
    total = np.where(known, x, 0).sum(-1, keepdims=True)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    squares = np.where(known, (x - mean) ** 2, 0).sum(-1, keepdims=True)
    return mean, np.sqrt(squares / np.maximum(count - 1, 1))


def advantages(rewards: np.ndarray, scale: str | bool) -> np.ndarray:
    """(prompts, completions) -> how much better than its group each is; 0 where the reward is NaN.

    scale: "group" or True divides by the deviation of the group, "batch" by that of all, "none" or
    False by nothing.
    """
    mean, deviation = moments(rewards)
    better = rewards - mean
    if scale == "batch":
        deviation = moments(rewards.reshape(-1))[1]
    if scale not in ("none", False):
        better = better / (deviation + EPS)
    return np.nan_to_num(better, nan=0.0)


def _grpo(lengths: np.ndarray, real: np.ndarray, most: int) -> np.ndarray:
    """Each completion's mean, then their mean."""
    return lengths.sum() / np.maximum(lengths, 1) / real.sum()


def _bnpo(lengths: np.ndarray, real: np.ndarray, most: int) -> np.ndarray:
    """The mean over the tokens of each micro-batch, then their mean."""
    each = lengths.sum(1, keepdims=True)
    return lengths.sum() / np.maximum(each, 1) / real.any(1).sum() * np.ones_like(lengths)


def _dr_grpo(lengths: np.ndarray, real: np.ndarray, most: int) -> np.ndarray:
    """The sum over tokens, by what is the same for all completions."""
    return np.full(lengths.shape, lengths.sum() / (real.sum() * most))


def _dapo(lengths: np.ndarray, real: np.ndarray, most: int) -> np.ndarray:
    """The mean over the tokens of the step."""
    return np.ones(lengths.shape)


SCALES: Registry[Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = Registry("loss_type")
"""By name: (lengths, real, max_completion_length) -> what each token of a row counts in the mean
over all tokens of a step.

lengths (micro-batches, rows): tokens that are learned; real: where there is a completion.
"""

for _name, _scale in {"grpo": _grpo, "bnpo": _bnpo, "dr_grpo": _dr_grpo, "dapo": _dapo}.items():
    SCALES.register(_name, _scale)

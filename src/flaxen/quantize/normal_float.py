"""Matrices as 4-bit normal floats: sixteen levels that are equally likely for normal numbers.

Source: QLoRA, https://arxiv.org/abs/2305.14314, appendix E.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from flaxen.core.errors import ConfigError
from flaxen.quantize.rounding import Rounding

NEGATIVE = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0)
POSITIVE = (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
LEVELS = np.array((*NEGATIVE, *POSITIVE), np.float32)
BETWEEN = (LEVELS[1:].astype(np.float64) + LEVELS[:-1]) / 2


@dataclasses.dataclass(frozen=True)
class NormalFloat(Rounding):
    """w is taken to be the nearest of `LEVELS` times a scale; codes -8 ... 7 stand for these in
    their order, and are stored as those of a `Rounding` of 4 bits.

    group: None is the first of 64 and 32 that divides the inputs, or all of them. A scale is the
    group's largest magnitude as float16, rounded up: 4.25 bits a weight in groups of 64, where the
    paper quantises float32 scales a second time and needs 4.13.
    """

    bits: int = 4
    groups: ClassVar[tuple[int, ...]] = (64, 32)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits != 4:
            raise ConfigError(f"Normal floats have 4 bits, not {self.bits}.")

    @property
    def top(self) -> float:
        return 1.0

    def rounded(self, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
        groups = values.reshape(*scales.shape, -1)
        shares = np.divide(groups, scales[..., None], dtype=np.float64)
        return (np.searchsorted(BETWEEN, shares) - 8).astype(np.int8).reshape(values.shape)

    def levels(self, codes: Any, xp: Any = np) -> Any:
        return xp.take(xp.asarray(LEVELS), codes.astype(xp.int32) + 8, axis=0)

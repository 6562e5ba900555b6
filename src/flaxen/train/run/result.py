"""What comes of a run."""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a run.

    model: with the trained weights, adapters merged; rows: the log, empty in all processes but the
    first; finished: False if a signal stopped the run (then only a checkpoint was written), and
    `signal` is its number; model_path, adapter_path, picture_path: None if not written.
    """

    model: Any
    output: Path
    log_path: Path
    step: int
    finished: bool
    rows: list[dict[str, Any]]
    model_path: Path | None = None
    adapter_path: Path | None = None
    picture_path: Path | None = None
    signal: int | None = None

    @property
    def losses(self) -> list[float]:
        """The mean loss of each step."""
        return [row["loss"] for row in self.rows if "loss" in row]

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step's completions, for objectives that ask for rewards."""
        return [row["reward"] for row in self.rows if "reward" in row]

    @property
    def perplexities(self) -> dict[int, float]:
        """Perplexity on held-out data after so many steps."""
        return {row["step"]: row["perplexity"] for row in self.rows if "perplexity" in row}

    @property
    def tokens_per_second(self) -> float:
        """Targets per second, the median step; the first, which compiles, counts only if it is the
        only one.
        """
        speeds = [row["tokens_per_second"] for row in self.rows if "loss" in row]
        return statistics.median(speeds[1:] or speeds or [math.nan])

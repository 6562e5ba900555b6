"""The numbers of a run in words: what the display on a terminal and plain lines have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flaxen.show.words import human_bytes, human_number
from flaxen.train.run.log import Row

DECAY = 0.9

TOLD = {"reward": "reward", "rewards/accuracies": "accuracy", "accuracy": "accuracy"}
"""What objectives tell that says more than their loss, and what it is called in a line."""


class Smoothed:
    """An exponential mean, corrected for its start; numbers that are not finite are left out."""

    def __init__(self, decay: float = DECAY):
        self.decay, self.total, self.weight = decay, 0.0, 0.0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self.total = self.decay * self.total + (1 - self.decay) * value
            self.weight = self.decay * self.weight + 1 - self.decay

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else math.nan


class Pace:
    """How a run goes, from its rows. steps: of the whole run."""

    def __init__(self, steps: int, step: int):
        self.steps, self.step = steps, step
        self.loss, self.seconds, self.speed = Smoothed(), Smoothed(), Smoothed()
        self.told = {key: Smoothed() for key in TOLD}
        self.last: Row = {}
        self.skipped = 0

    def add(self, row: Row) -> None:
        """A step's row; the first one's time, which is that of compiling, does not count."""
        if self.last:
            self.seconds.add(row["seconds"])
            self.speed.add(row["tokens_per_second"])
        self.last, self.step = row, row["step"]
        self.skipped = row.get("skipped", 0)
        self.loss.add(row["loss"])
        for key, mean in self.told.items():
            mean.add(row.get(key, math.nan))

    @property
    def left(self) -> float:
        """Seconds until the last step; NaN when not known yet."""
        return self.seconds.mean * (self.steps - self.step)

    def numbers(self) -> list[str]:
        """What the last row says, a few words for each number."""
        row = self.last
        if not row:
            return ["compiling"]
        speed = self.speed.mean if self.speed.weight else row["tokens_per_second"]
        words = [*self._told(), f"loss {self.loss.mean:.4f} (last {row['loss']:.4f})"]
        words.append(f"lr {row['lr']:.3g}")
        words += [f"grad norm {row['grad_norm']:.3g}", f"{human_number(speed)} tokens/s"]
        if "mfu" in row:
            words.append(f"MFU {row['mfu']:.1%}")
        if "memory_bytes" in row:
            words.append(human_bytes(row["memory_bytes"]))
        return words

    def _told(self) -> Iterator[str]:
        """Running means, and what the last row says, with its spread if it tells that."""
        for key, mean in self.told.items():
            if key in self.last:
                last = [f"{self.last[k]:.3f}" for k in (key, f"{key}_std") if k in self.last]
                yield f"{TOLD[key]} {mean.mean:.3f} (last {' ± '.join(last)})"

    def skips(self) -> str:
        """How many steps changed nothing; empty if none."""
        return f"{self.skipped} skipped" if self.skipped else ""


def clock(seconds: float) -> str:
    """3725 -> '1:02:05'."""
    if not math.isfinite(seconds):
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def evaluated(row: Row) -> str:
    """An evaluation in one line."""
    told = {key: value for key, value in row.items() if key not in ("step", "eval_seconds")}
    words = (f"{key.replace('_', ' ')} {_number(value)}" for key, value in told.items())
    return f"step {row['step']}: " + ", ".join(words)


def _number(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 else f"{value:.4g}"

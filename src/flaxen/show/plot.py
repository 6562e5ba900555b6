"""Pictures of runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flaxen.core.errors import InputError


def loss_picture(log: str | os.PathLike[str], png: str | os.PathLike[str]) -> Path:
    """Draw the loss of a run from its JSONL log: every step, their running mean, and evaluations.

    Each line is an object with `step` and `loss`, and perhaps `eval_loss`.

    Raises:
        InputError: when no line has a loss.
    """
    rows = read_log(log)
    points = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    if not points:
        raise InputError(f"{log} has no line with 'step' and 'loss', so there is nothing to draw.")
    tests = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    return _draw(points, tests, Path(png))


def read_log(log: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The whole lines of a JSONL log; a last line that is still being written is left out."""
    text = Path(log).read_text(encoding="utf-8")
    lines = text.splitlines()[: text.count("\n")]
    return [json.loads(line) for line in lines if line.strip()]


def _draw(points: list[tuple[int, float]], tests: list[tuple[int, float]], png: Path) -> Path:
    # A figure of its own, without pyplot: no window system, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps, losses = zip(*points, strict=True)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="loss")
    axes.plot(steps, _running_mean(losses), color="tab:blue", linewidth=2, label="running mean")
    if tests:
        axes.plot(*zip(*tests, strict=True), "o-", color="tab:orange", label="evaluation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png)
    return png


def _running_mean(values: tuple[float, ...], decay: float = 0.9) -> list[float]:
    """An exponential mean, corrected for its start."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + (1 - decay) * value, decay * weight + 1 - decay
        means.append(total / weight)
    return means

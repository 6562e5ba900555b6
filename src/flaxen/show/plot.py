"""Pictures of runs."""

from __future__ import annotations

import colorsys
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flaxen.core.errors import InputError
from flaxen.core.whole_file import whole_file
from flaxen.show.curves import Curve, Panel, read_log, smoothed

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
"""Of the first runs."""


def colour(run: int) -> str:
    """Of a run; beyond the first ones, hues that are far from those of its neighbours."""
    if run < len(COLOURS):
        return COLOURS[run]
    rgb = colorsys.hls_to_rgb(run * 0.618034 % 1, 0.4, 0.6)
    return "#" + "".join(f"{round(255 * x):02x}" for x in rgb)


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


def _draw(points: list[tuple[int, float]], tests: list[tuple[int, float]], png: Path) -> Path:
    # A figure of its own, without pyplot: no window system, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps, losses = zip(*points, strict=True)
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="loss")
    axes.plot(steps, smoothed(losses), color="tab:blue", linewidth=2, label="running mean")
    if tests:
        axes.plot(*zip(*tests, strict=True), "o-", color="tab:orange", label="evaluation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return _saved(figure, png)


def curves_picture(
    panels: Sequence[Panel], png: str | os.PathLike[str], x: str, *, log_y: bool = False
) -> Path:
    """Draw curves of several runs as a PNG, one field for each metric, two in a row."""
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(7 * columns, 4 * lines), dpi=120, layout="constrained")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, i + 1)
        for curve in panel.curves:
            _add(axes, curve)
        axes.set_title(panel.metric)
        axes.set_xlabel(x)
        above = any(value > 0 for curve in panel.curves for value in curve.y)
        axes.set_yscale("log" if log_y and above else "linear")
        axes.grid(alpha=0.3)
        axes.legend()
    return _saved(figure, Path(png))


def _saved(figure: Any, png: Path) -> Path:
    png.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(png) as aside:
        figure.savefig(aside, format="png")
    return png


def _add(axes: Any, curve: Curve) -> None:
    one = colour(curve.run)
    if curve.tests:
        axes.plot(curve.x, curve.y, "o--", color=one, markersize=4, label=curve.label)
        return
    if curve.smooth is not curve.y:
        axes.plot(curve.x, curve.y, color=one, alpha=0.25, linewidth=1)
    axes.plot(curve.x, curve.smooth, color=one, linewidth=2, label=curve.label)

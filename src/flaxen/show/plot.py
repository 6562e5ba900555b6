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
    """Draw the loss of a run from its JSONL log: every step, their running mean, and evaluations;
    above it the reward, if there is one, with the deviation of completions as a band.

    Each line is an object with `step` and `loss`, and perhaps `eval_loss`, `reward`, `reward_std`
    and `eval_reward`.

    Raises:
        InputError: when no line has a loss.
    """
    # A figure of its own, without pyplot: no window system, no global state.
    from matplotlib.figure import Figure

    rows = read_log(log)
    names = [name for name in ("reward", "loss") if any(name in row for row in rows)]
    if "loss" not in names:
        raise InputError(f"{log} has no line with 'step' and 'loss', so there is nothing to draw.")
    figure = Figure(figsize=(7, 4 * len(names)), dpi=120, layout="constrained")
    for i, name in enumerate(names):
        _measured(figure.add_subplot(len(names), 1, i + 1), rows, name)
    return _saved(figure, Path(png))


def _measured(axes: Any, rows: list[dict[str, Any]], name: str) -> None:
    """One number of a run's steps, its running mean, its spread, and what evaluations found."""
    steps = [row for row in rows if name in row]
    at, values = ([row[key] for row in steps] for key in ("step", name))
    axes.plot(at, values, color="tab:blue", alpha=0.3, linewidth=1, label=name)
    axes.plot(at, smoothed(values), color="tab:blue", linewidth=2, label="running mean")
    if all(f"{name}_std" in row for row in steps):
        low, high = ([row[name] + k * row[f"{name}_std"] for row in steps] for k in (-1, 1))
        axes.fill_between(at, low, high, color="tab:blue", alpha=0.1, label="deviation")
    tests = [(row["step"], row[f"eval_{name}"]) for row in rows if f"eval_{name}" in row]
    if tests:
        axes.plot(*zip(*tests, strict=True), "o-", color="tab:orange", label="evaluation")
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    axes.legend()


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

"""Curves of runs, from their logs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flaxen.core.errors import InputError, did_you_mean

AXES = ("step", "tokens", "seconds")
"""What a curve may be drawn over: steps, targets learned from, or seconds spent in steps."""

USUAL = ("loss", "perplexity", "grad_norm", "lr", "tokens_per_second")
TOLD = ("reward", "reward_std", "rewards/accuracies", "rewards/margins", "accuracy")
"""What is drawn unless something else is asked for: of every run, and of some objectives first."""

FAR = 1e300
"""Beyond it, nothing is drawn."""

MOST = 2000
"""Points of a curve; of a longer run, each is the mean of several."""


@dataclasses.dataclass(frozen=True)
class Log:
    """One run: its label, the file, and its rows."""

    label: str
    path: Path
    rows: list[dict[str, Any]]

    def metrics(self) -> list[str]:
        """Every number that its rows have."""
        names = dict.fromkeys(key for row in self.rows for key in row)
        return [name for name in names if name != "step"]


@dataclasses.dataclass(frozen=True)
class Curve:
    """run: its number; tests: whether these are evaluations; smooth: y, smoothed, or y itself."""

    run: int
    label: str
    tests: bool
    x: list[float]
    y: list[float]
    smooth: list[float]


@dataclasses.dataclass(frozen=True)
class Panel:
    """All curves of one metric."""

    metric: str
    curves: list[Curve]


def read_log(log: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The whole lines of a JSONL log; a last line that is still being written is left out.

    Raises:
        InputError: it cannot be read, or another line is no object with a step.
    """
    try:
        text = Path(log).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{log} cannot be read: {error}.") from error
    lines = text.split("\n")[:-1]
    return [_row(f"{log}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]


def _row(where: str, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        raise InputError(
            f"{where} is {line[:60]!r}; expected a JSON object with a step, as runs write them "
            "into log.jsonl."
        )
    return {
        key: value if key == "step" else _drawable(value)
        for key, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _drawable(value: float) -> float:
    """Numbers whose differences are no numbers any more count as infinite."""
    if abs(value) > FAR:
        return math.inf if value > 0 else -math.inf
    return value


def open_runs(runs: Sequence[str | os.PathLike[str]]) -> list[Log]:
    """The logs of runs: each an output folder, or the log itself. Labels are as short as tells them
    apart.

    Raises:
        InputError: there is no log, or no row in it.
    """
    paths = []
    for run in map(Path, runs):
        path = run / "log.jsonl" if run.is_dir() else run
        if not path.is_file():
            raise InputError(
                f"{run} is no run: it {'has no log.jsonl' if run.is_dir() else 'is not there'}. "
                "Give folders that `flaxen train` wrote, or their log.jsonl."
            )
        paths.append(path)
    logs = [
        Log(label, path, read_log(path)) for label, path in zip(_labels(paths), paths, strict=True)
    ]
    for log in logs:
        if not log.rows:
            raise InputError(f"{log.path} has no whole line yet, so there is nothing to draw.")
        if not log.metrics():
            raise InputError(
                f"{log.path} has no number besides steps, so there is nothing to draw."
            )
    return logs


def _labels(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of those above as tell them apart."""
    folders = [path.resolve().parent.parts for path in paths]
    deepest = max(map(len, folders))
    for depth in range(1, deepest + 1):
        names = ["/".join(parts[-depth:]) for parts in folders]
        if len(set(names)) == len(set(map(tuple, folders))):
            return names
    return [str(path) for path in paths]


def panels(
    logs: Sequence[Log], metrics: Sequence[str] = (), x: str = "step", smooth: float = 0.9
) -> list[Panel]:
    """The curves of these metrics, or of the usual ones that there are. With `loss` comes
    `eval_loss`, and so for each metric.

    smooth: how much of the running mean each point keeps; 0 draws points alone.

    Raises:
        InputError: a metric that no run has, or an axis or smoothing that makes no sense.
    """
    if x not in AXES:
        raise InputError(f"x is {x!r}; expected one of {', '.join(AXES)}.")
    if not 0 <= smooth < 1:
        raise InputError(f"smooth is {smooth}; expected at least 0 and less than 1.")
    known = dict.fromkeys(name for log in logs for name in log.metrics())
    for name in metrics:
        if name not in known:
            raise InputError(f"No run has a metric {name!r}.{did_you_mean(name, known)}")
    names = metrics or [name for name in TOLD + USUAL if name in known] or list(known)[:1]
    return [Panel(name, list(_curves(logs, name, x, smooth))) for name in names]


def _curves(logs: Sequence[Log], metric: str, x: str, smooth: float) -> Iterable[Curve]:
    for i, log in enumerate(logs):
        places = _places(log.rows, x)
        for name in (metric, f"eval_{metric}"):
            rows = [(at, row) for at, row in zip(places, log.rows, strict=True) if name in row]
            found = [(at, row[name]) for at, row in rows if math.isfinite(at)]
            if not found:
                continue
            tests = not any("loss" in row for row in log.rows if name in row)
            xs, ys = map(list, zip(*found, strict=True))
            even = smoothed(ys, smooth) if smooth and not tests else ys
            xs, thin, even_thin = _thinned(xs), _thinned(ys), _thinned(even)
            label = f"{log.label} (evaluation)" if name != metric else log.label
            yield Curve(i, label, tests, xs, thin, thin if even is ys else even_thin)


def _places(rows: Sequence[dict[str, Any]], x: str) -> list[float]:
    """Where each row stands on the axis."""
    if x == "step":
        return [row["step"] for row in rows]
    return list(itertools.accumulate(row.get(x, 0) for row in rows))


def smoothed(values: Sequence[float], decay: float = 0.9) -> list[float]:
    """An exponential mean, corrected for its start; values that are not finite leave it as it
    was.
    """
    means, total, weight = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            total, weight = decay * total + (1 - decay) * value, decay * weight + 1 - decay
        means.append(total / weight if weight else math.nan)
    return means


def _thinned(values: list[float]) -> list[float]:
    size = -(-len(values) // MOST)
    if size <= 1:
        return values
    groups = (values[i : i + size] for i in range(0, len(values), size))
    return [sum(group) / len(group) for group in groups]


def summary(logs: Sequence[Log], metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Of each run its first, last, least and greatest number of each metric."""
    return [
        {
            "run": log.label,
            "log": log.path,
            "step": max(row["step"] for row in log.rows),
            "metrics": {name: _extent(log, name) for name in _with_tests(metrics, log)},
        }
        for log in logs
    ]


def _with_tests(metrics: Sequence[str], log: Log) -> list[str]:
    known = log.metrics()
    return [n for name in metrics for n in (name, f"eval_{name}") if n in known]


def _extent(log: Log, name: str) -> dict[str, float]:
    values = [row[name] for row in log.rows if name in row]
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    return {"first": values[0], "last": values[-1], "least": min(finite), "greatest": max(finite)}

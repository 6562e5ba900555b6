"""What a run tells while it goes: a JSONL log, and a bar on the terminal."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from flaxen.core.errors import CheckpointError
from flaxen.shard.host import from_first

Report = Callable[[dict[str, Any]], None]


class Log:
    """One JSON object a line, each written at once; lines after `step` from an earlier run are
    dropped first. Of several processes the first alone reads and writes.

    eval_losses: on held-out data, by step; every process knows the same.

    Raises:
        CheckpointError: it cannot be written, or what is there is no log of a run.
    """

    def __init__(self, path: Path, step: int):
        self.path, self.first = path, jax.process_index() == 0
        kept = [row for row in self.rows() if row["step"] <= step]
        losses = [row["eval_loss"] for row in kept if "eval_loss" in row and row["step"] == step]
        known = from_first(losses[-1] if losses else math.nan)
        self.eval_losses = {} if math.isnan(known) else {step: known}
        if not self.first:
            return
        aside = path.with_suffix(".partial")
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text("".join(map(_line, kept)), encoding="utf-8")
            os.replace(aside, path)

    def write(self, row: dict[str, Any]) -> None:
        if "eval_loss" in row:
            self.eval_losses[row["step"]] = row["eval_loss"]
        if self.first:
            with _writing(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(_line(row))

    def rows(self) -> list[dict[str, Any]]:
        """All whole lines; one that was cut off by a crash is left out."""
        if not self.first or not self.path.exists():
            return []
        try:
            text = self.path.read_text(encoding="utf-8")
            rows = [json.loads(line) for line in text.splitlines()[: text.count("\n")] if line]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} is no log of a run: {error}.") from error
        if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
            raise CheckpointError(
                f"{self.path} is no log of a run: a line has no step. Train into another folder."
            )
        return rows


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from error


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


@contextlib.contextmanager
def progress_bar(steps: int, done: int, show: bool) -> Iterator[Report]:
    """A bar with loss, tokens per second and the time left; the report is given each step's log
    row.
    """
    if not show:
        yield lambda row: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("", total=steps, completed=done, said="compiling")
        yield lambda row: bar.update(
            task,
            completed=row["step"],
            said=f"loss {row['loss']:.4f}, {row['tokens_per_second']:,.0f} tokens/s",
        )

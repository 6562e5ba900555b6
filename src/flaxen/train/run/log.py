"""What a run tells while it goes: a JSONL log, which is the source of all that is shown of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax

from flaxen.core.errors import CheckpointError
from flaxen.shard.host import from_first

Row = dict[str, Any]
Report = Callable[[Row], None]


class Listener(Protocol):
    """Whoever is told of each row when it is written: of a step, of an evaluation (with
    `eval_loss`), of an answer to a sample prompt (with `step`, `prompt` and `text`).
    """

    def row(self, row: Row) -> None: ...

    def sample(self, row: Row) -> None: ...


class Log:
    """One JSON object a line, each written at once; lines after `step` from an earlier run are
    dropped first, and stay in `dropped`. Of several processes the first alone reads, writes and
    tells `listeners`.

    eval_losses: on held-out data, by step, or rewards with a minus; every process knows the same.

    Raises:
        CheckpointError: it cannot be written, or what is there is no log of a run.
    """

    def __init__(self, path: Path, step: int):
        self.path, self.first = path, jax.process_index() == 0
        self.listeners: list[Listener] = []
        before = self.rows()
        kept = [row for row in before if row["step"] <= step]
        self.dropped = [row for row in before if row["step"] > step]
        losses = [loss for row in kept if row["step"] == step and (loss := _loss(row)) is not None]
        known = from_first(losses[-1] if losses else math.nan)
        self.eval_losses = {} if math.isnan(known) else {step: known}
        if not self.first:
            return
        aside = path.with_suffix(".partial")
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text("".join(map(_line, kept)), encoding="utf-8")
            os.replace(aside, path)

    def write(self, row: Row) -> None:
        if (loss := _loss(row)) is not None:
            self.eval_losses[row["step"]] = loss
        if not self.first:
            return
        with _writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
        for listener in self.listeners:
            listener.row(row)

    def rows(self) -> list[Row]:
        """All whole lines; one that was cut off by a crash is left out."""
        return read_rows(self.path) if self.first else []


def read_rows(path: Path) -> list[Row]:
    """The whole lines of a log; none if there is no file.

    Raises:
        CheckpointError: what is there is no log of a run.
    """
    if not path.exists():
        return []
    try:
        text = path.read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.split("\n")[:-1] if line]
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no log of a run: {error}.") from error
    if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
        raise CheckpointError(
            f"{path} is no log of a run: a line has no step. Train into another folder."
        )
    return rows


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from error


def _loss(row: Row) -> float | None:
    """What an evaluation found, the less the better; None of other rows."""
    return row.get("eval_loss", -row["eval_reward"] if "eval_reward" in row else None)


def _line(row: Row) -> str:
    return json.dumps(row, default=str) + "\n"

"""What a run tells while it goes: a JSONL log, which is the source of all that is shown of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

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
    dropped first, and stay in `dropped`.
    """

    def __init__(self, path: Path, step: int):
        self.path = path
        self.listeners: list[Listener] = []
        before = self.rows()
        kept = [row for row in before if row["step"] <= step]
        self.dropped = [row for row in before if row["step"] > step]
        aside = path.with_suffix(".partial")
        aside.write_text("".join(map(_line, kept)), encoding="utf-8")
        os.replace(aside, path)

    def write(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row))
        for listener in self.listeners:
            listener.row(row)

    def rows(self) -> list[Row]:
        """All whole lines; one that was cut off by a crash is left out."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()[: text.count("\n")] if line]


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"

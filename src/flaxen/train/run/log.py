"""What a run tells while it goes: a JSONL log, and a bar on the terminal."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Report = Callable[[dict[str, Any]], None]


class Log:
    """One JSON object a line, each written at once; lines after `step` from an earlier run are
    dropped first.
    """

    def __init__(self, path: Path, step: int):
        self.path = path
        kept = [row for row in self.rows() if row["step"] <= step]
        aside = path.with_suffix(".partial")
        aside.write_text("".join(map(_line, kept)), encoding="utf-8")
        os.replace(aside, path)

    def write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(row))

    def rows(self) -> list[dict[str, Any]]:
        """All whole lines; one that was cut off by a crash is left out."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()[: text.count("\n")] if line]


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

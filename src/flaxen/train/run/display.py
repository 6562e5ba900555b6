"""What a run shows while it goes, on stderr: two lines that change on a terminal, else plain lines
now and then.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from flaxen.train.run.log import Listener, Row
from flaxen.train.run.pace import Pace, clock, evaluated

EVERY = 10.0
"""Seconds between plain lines."""


class Lines:
    """Plain lines: the first step, one every so many steps or seconds, and the last."""

    def __init__(self, steps: int, step: int, every: int = 0):
        self.pace, self.every = Pace(steps, step), every
        self.before = -EVERY

    def row(self, row: Row) -> None:
        if "loss" not in row:
            self.say(evaluated(row))
            return
        first = not self.pace.last
        self.pace.add(row)
        if first or row["step"] == self.pace.steps or self._due(row["step"]):
            self.before = time.monotonic()
            self.say(", ".join(self._words()))

    def sample(self, row: Row) -> None:
        self.say(f"step {row['step']}: {row['prompt']!r} -> {row['text']!r}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _due(self, step: int) -> bool:
        if self.every:
            return step % self.every == 0
        return time.monotonic() - self.before >= EVERY

    def _words(self) -> Iterator[str]:
        yield f"step {self.pace.step}/{self.pace.steps}"
        yield from self.pace.numbers()
        yield from filter(None, [self.pace.skips()])
        if self.pace.step < self.pace.steps:
            yield f"{clock(self.pace.left)} left"


class Live:
    """A bar, and under it the newest numbers; evaluations and answers are lines above it."""

    def __init__(self, steps: int, step: int, console: Any):
        self.pace, self.console = Pace(steps, step), console
        self.started = time.monotonic()

    def row(self, row: Row) -> None:
        if "loss" in row:
            self.pace.add(row)
        else:
            self.say(evaluated(row), "bold")

    def sample(self, row: Row) -> None:
        from rich.text import Text

        told = Text.assemble(f"step {row['step']}: ", (row["prompt"], "dim"), " → ", row["text"])
        self.console.print(told)

    def say(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self.console.print(Text(text, style=style))

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        pace, bar = self.pace, Table.grid(padding=(0, 2, 0, 0), expand=True)
        for ratio in (None, 1, None, None):
            bar.add_column(ratio=ratio, no_wrap=True)
        spent = clock(time.monotonic() - self.started)
        bar.add_row(
            "training",
            ProgressBar(total=max(pace.steps, 1), completed=pace.step),
            f"{pace.step:,}/{pace.steps:,}",
            f"{spent}, {clock(pace.left)} left",
        )
        numbers = Text(" · ".join(pace.numbers()), style="cyan")
        if pace.skips():
            numbers.append(f" · {pace.skips()}", style="bold red")
        return Group(bar, numbers)


@contextlib.contextmanager
def display(steps: int, step: int, every: int, show: bool) -> Iterator[list[Listener]]:
    """Who shows a run, if anybody does."""
    if not show:
        yield []
        return
    from rich.console import Console
    from rich.live import Live as Screen

    console = Console(stderr=True)
    if step:
        console.print(f"Going on after step {step:,} of {steps:,}.", style="dim", highlight=False)
    if not console.is_terminal:
        yield [Lines(steps, step, every)]
        return
    live = Live(steps, step, console)
    with Screen(live, console=console, refresh_per_second=4):
        yield [live]

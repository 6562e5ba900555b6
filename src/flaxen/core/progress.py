"""A bar for work that takes a while, in bytes or in other units."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = bool | Callable[[int], None]
"""True for a bar on stderr, False for none, or a function that is told what is done, in units."""

PATIENCE = 1.0
"""Seconds of work before a bar appears: what is over at once shows none."""


@contextmanager
def reporting(
    progress: Progress, title: str, total: int | None = None, *, unit: str = "bytes"
) -> Iterator[Callable[[int], None] | None]:
    """What to tell how many units are done; a bar is drawn on a terminal or in a notebook only."""
    if callable(progress) or not progress:
        yield progress or None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = [MofNCompleteColumn(), TextColumn(unit)]
    if unit == "bytes":
        counts = [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *counts,
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task, start, shown = bar.add_task(title, total=total), time.monotonic(), False

    def advance(nbytes: int) -> None:
        nonlocal shown
        bar.advance(task, nbytes)
        if not shown and time.monotonic() - start > PATIENCE:
            shown = True
            bar.start()

    try:
        yield advance
    finally:
        bar.stop()

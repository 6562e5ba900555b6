"""What commands print: JSON to stdout, remarks to stderr, progress while bytes move."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def print_json(value: Any) -> None:
    """One JSON object on stdout; what JSON does not know becomes its text."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def remark(text: str) -> None:
    """A dim line on stderr, where it does not mix with the answer."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(text, style="dim"))


def write_now(text: str) -> None:
    """Text on stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that is told bytes as they arrive; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda size: bar.advance(task, size)

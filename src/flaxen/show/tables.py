"""What is printed: trees and tables for rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from flaxen.show.parts import Part
from flaxen.show.words import human_bytes, human_number

if TYPE_CHECKING:
    from rich.table import Table


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> Table:
    """A plain table; numbers are set to the right, text to the left."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = [list(row) for row in rows]
    made = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for i, header in enumerate(headers):
        numbers = rows and all(isinstance(row[i], int | float | None) for row in rows)
        side = "right" if numbers else "left"
        # The first column names the row: it stays in one piece where there is too little room.
        made.add_column(header, justify=side, overflow="fold", no_wrap=i == 0)
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    return made


def parts_tree(root: Part) -> Table:
    """The parts with their sizes; equal layers are one line."""
    cut = root.device_bytes != root.nbytes
    headers = ["part", "shape", "dtype", "parameters", "bytes"]
    headers += ["per device", "cut along"] if cut else []
    rows = [_row(indent, part, cut) for indent, part in _lines(root)]
    made = table(headers, rows)
    for column in made.columns[3:6]:
        column.justify = "right"
    return made


def _lines(part: Part, depth: int = 0, before: str = "") -> Iterable[tuple[str, Part]]:
    """Every part with its indented name; a part with a single child shares its line."""
    label = f"{before}.{part.name}" if before else part.name
    if len(part.children) == 1:
        yield from _lines(part.children[0], depth, label)
        return
    yield "  " * depth + label, part
    for child in part.children:
        yield from _lines(child, depth + 1)


def _row(label: str, part: Part, cut: bool) -> list[str]:
    names = part.axes or ("",) * len(part.shape or ())
    shape = ", ".join(
        f"{n}={s}" if n else str(s) for n, s in zip(names, part.shape or (), strict=True)
    )
    row = [label, shape, part.dtype or "", human_number(part.parameters), human_bytes(part.nbytes)]
    return [*row, human_bytes(part.device_bytes), ", ".join(part.cut or ())] if cut else row


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

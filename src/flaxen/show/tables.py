"""What is printed: trees and tables for rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from flaxen.show.parts import Part
from flaxen.show.words import human_bytes, human_number

if TYPE_CHECKING:
    from rich.table import Table

SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> Table:
    """A plain table; numbers are set to the right, text to the left."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = [list(row) for row in rows]
    made = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for i, header in enumerate(headers):
        numbers = rows and all(isinstance(row[i], int | float | None) for row in rows)
        side = "right" if numbers else "left"
        # Where there is too little room, text breaks before names and numbers do.
        made.add_column(header, justify=side, overflow="fold", no_wrap=i == 0 or bool(numbers))
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    return made


def parts_tree(root: Part) -> Table:
    """The parts with their sizes; equal layers are one line, with one of them below it.

    `f32 heads=32/tp` is a weight with an axis of 32, cut along the mesh axis tp.
    """
    apart = root.device_bytes != root.nbytes
    headers = ["part", "weight", "params", "per device" if apart else "bytes"]
    made = table(headers, [_row(indent, part, apart) for indent, part in _lines(root)])
    for column in made.columns[2:]:
        column.justify, column.no_wrap = "right", True
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


def _row(label: str, part: Part, apart: bool) -> list[str]:
    row = [label, _weight(part)]
    size = part.device_bytes if apart else part.nbytes
    return [*row, human_number(part.parameters), human_bytes(size)]


def _weight(part: Part) -> str:
    shape = part.shape or ()
    names = [f"{name}=" for name in part.axes or ()] or [""] * len(shape)
    cuts = ["" if cut == "-" else f"/{cut}" for cut in part.cut or ()]
    cuts += [""] * (len(shape) - len(cuts))
    sizes = (f"{n}{size}{c}" for n, size, c in zip(names, shape, cuts, strict=True))
    return " ".join([SHORT.get(part.dtype or "", part.dtype or ""), *sizes])


def _cell(value: Any) -> Any:
    """As text; what has colours already stays as it is."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}"
    if hasattr(value, "plain"):
        return value
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

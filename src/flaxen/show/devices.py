"""Which device holds which piece of each weight."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flaxen.show.parts import Part
from flaxen.show.words import human_bytes

if TYPE_CHECKING:
    from rich.text import Text

Box = tuple[tuple[int, int], ...]

COLOURS = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#e15759",
    "#76b7b2",
    "#edc948",
    "#b07aa1",
    "#9c755f",
)
"""Pieces in turn; a ninth is coloured as the first."""

MANY = 64
"""More pieces are counted, not drawn."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of a weight, as (start, stop) of each dimension, and the devices that hold it."""

    box: Box
    devices: tuple[int, ...]


def device_names(mesh: Mapping[str, int]) -> list[str]:
    """What each device is called, in order: `fsdp 0, tp 3`."""
    places = itertools.product(*(range(n) for n in mesh.values()))
    return [", ".join(f"{a} {i}" for a, i in zip(mesh, place, strict=True)) for place in places]


def pieces(part: Part, mesh: Mapping[str, int]) -> list[Piece]:
    """The pieces that a mesh cuts a weight into; devices are counted along the mesh's last axis
    first.
    """
    cuts = [cut.split("*") if cut != "-" else [] for cut in part.cut or ()]
    cuts += [[] for _ in range(len(part.shape or ()) - len(cuts))]
    found: dict[Box, list[int]] = {}
    for device, place in enumerate(itertools.product(*(range(n) for n in mesh.values()))):
        where = dict(zip(mesh, place, strict=True))
        box = tuple(
            _range(n, axes, where, mesh) for n, axes in zip(part.shape or (), cuts, strict=True)
        )
        found.setdefault(box, []).append(device)
    return [Piece(box, tuple(devices)) for box, devices in sorted(found.items())]


def _range(
    size: int, axes: Sequence[str], where: Mapping[str, int], mesh: Mapping[str, int]
) -> tuple[int, int]:
    index, count = 0, math.prod(mesh[axis] for axis in axes)
    for axis in axes:
        index = index * mesh[axis] + where[axis]
    return index * (size // count), (index + 1) * (size // count)


def weights(root: Part, before: str = "") -> Iterator[tuple[str, Part]]:
    """Every kind of weight with its path: `layers.{0...29}.mlp.up_proj.weight`."""
    for child in root.children:
        path = f"{before}{child.name}"
        if child.shape is not None:
            yield path, child
        yield from weights(child, f"{path}.")


def grid(found: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces as rows and columns of one picture: the first cut dimension goes down, what else is
    cut goes across.
    """
    rows: dict[Any, list[Piece]] = {}
    down = next((d for d in range(len(found[0].box)) if len({p.box[d] for p in found}) > 1), None)
    for piece in found:
        rows.setdefault(None if down is None else piece.box[down], []).append(piece)
    return list(rows.values())


def pictures(root: Part, mesh: Mapping[str, int]) -> list[tuple[str, Text]]:
    """The weights that are cut, those that look alike together, and how they lie."""
    alike: dict[Any, list[str]] = {}
    shown: dict[Any, Text] = {}
    for path, part in weights(root):
        found = pieces(part, mesh)
        if len(found) > 1:
            look = tuple(tuple(piece.devices for piece in row) for row in grid(found))
            alike.setdefault(look, []).append(path)
            shown.setdefault(look, drawn(found))
    return [("\n".join(paths), shown[look]) for look, paths in alike.items()]


def drawn(found: Sequence[Piece], widest: int = 48) -> Text:
    """The grid for a terminal: each piece in its colour, with the devices that hold it."""
    from rich.text import Text

    if len(found) > MANY:
        each = len(found[0].devices)
        return Text(f"{len(found)} pieces, each on {each} device{'s' * (each > 1)}")
    colours = {piece.box: COLOURS[i % len(COLOURS)] for i, piece in enumerate(found)}
    text = Text()
    for i, row in enumerate(grid(found)):
        labels = [_listed(piece.devices) for piece in row]
        if sum(len(label) + 2 for label in labels) > widest:
            labels = [str(piece.devices[0]) for piece in row]
        text.append("\n" if i else "")
        for piece, label in zip(row, labels, strict=True):
            text.append(f" {label} ", style=f"white on {colours[piece.box]}")
    return text


def _listed(devices: Sequence[int]) -> str:
    """0-3,8 for 0 1 2 3 8."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def shares(root: Part) -> list[tuple[str, int]]:
    """Where a device's bytes go: (kind of part, bytes), the largest first."""
    total: dict[str, int] = {}

    def add(part: Part, kind: str | None, times: int) -> None:
        times *= part.copies
        for child in part.children:
            numbered = child.name == "layers" or child.name.isdigit() or child.copies > 1
            own = kind or (None if numbered else child.name)
            if child.shape is not None:
                name = own or child.name
                total[name] = total.get(name, 0) + child.device_bytes * times
            add(child, own, times)

    add(root, None, 1)
    return sorted(total.items(), key=lambda item: -item[1])


def share_lines(root: Part, width: int = 40) -> str:
    """The same as bars of text."""
    rows = shares(root)
    longest = max((len(name) for name, _ in rows), default=0)
    whole = max(root.device_bytes, 1)
    return "\n".join(
        f"{name:<{longest}}  {'█' * max(1, round(width * size / whole))} {human_bytes(size)}"
        for name, size in rows
    )

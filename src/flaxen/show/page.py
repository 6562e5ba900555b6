"""A page that shows where each weight lives: one HTML file, without scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from flaxen.show.devices import COLOURS, Piece, device_names, grid, pieces, shares, weights
from flaxen.show.parts import Part
from flaxen.show.words import human_bytes, human_number

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
td { padding: .35rem .8rem .35rem 0; vertical-align: top }
tr { border-top: 1px solid #ddd }
.num { text-align: right; white-space: nowrap }
.weight { display: grid; gap: 1px; width: 16rem }
.bar { display: flex; height: 1.6rem }
.weight span, .bar span { color: #fff; font-size: .75rem; overflow: hidden; padding: 0 .3rem;
  white-space: nowrap; text-overflow: ellipsis }
.device { display: inline-block; border: 1px solid #bbb; border-radius: 4px; margin: .15rem;
  padding: .2rem .6rem; font-size: .85rem }
"""


def placement_page(
    title: str, root: Part, mesh: Mapping[str, int], notes: Sequence[str] = ()
) -> str:
    """The page as text.

    title: the model's name; root: its `parts` with a placement on a mesh of these sizes; notes:
    what could not be cut.
    """
    names, text = device_names(mesh), html.escape
    shape = ", ".join(f"{axis}={n}" for axis, n in mesh.items())
    body = [
        f"<h1>{text(title)} on {text(shape)}</h1>",
        f"<p>{human_number(root.parameters)} parameters, {human_bytes(root.nbytes)}; "
        f"{human_bytes(root.device_bytes)} on each of {len(names)} devices.</p>",
        *(f"<p>Replicated: {text(note)}.</p>" for note in notes),
        "<h2>Devices</h2>",
        "<p>" + "".join(_device(i, name, root) for i, name in enumerate(names[:256])) + "</p>",
        "<h2>A device's bytes</h2>",
        _bar(root),
        "<h2>Weights</h2>",
        "<p>Each picture is one weight, each field a piece with the devices that hold it. The "
        "first dimension that is cut goes down, what else is cut goes across.</p>",
        "<table>",
        *(_row(path, part, pieces(part, mesh), names) for path, part in weights(root)),
        "</table>",
    ]
    screen = "<meta name='viewport' content='width=device-width'>"
    head = f"<meta charset='utf-8'>{screen}<title>{text(title)}</title><style>{STYLE}</style>"
    return (
        f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(body)}</body></html>\n"
    )


def _device(index: int, name: str, root: Part) -> str:
    size = human_bytes(root.device_bytes)
    return f"<span class='device'><b>{index}</b> {html.escape(name)}<br>{size}</span>"


def _bar(root: Part) -> str:
    whole = max(root.device_bytes, 1)
    spans = [
        f"<span style='width:{100 * size / whole:.2f}%;background:{COLOURS[i % len(COLOURS)]}' "
        f"title='{html.escape(name)}: {human_bytes(size)}'>{html.escape(name)}</span>"
        for i, (name, size) in enumerate(shares(root))
    ]
    return f"<div class='bar'>{''.join(spans)}</div>"


def _row(path: str, part: Part, found: Sequence[Piece], names: Sequence[str]) -> str:
    axes = part.axes or [""] * len(part.shape or ())
    cuts = [*(part.cut or ()), *["-"] * len(axes)]
    sizes = ", ".join(
        f"{axis} {n}" + (f" / {cut}" if cut != "-" else "")
        for axis, n, cut in zip(axes, part.shape or (), cuts, strict=False)
    )
    return (
        f"<tr><td><code>{html.escape(path)}</code><br>{html.escape(sizes)}; {part.dtype}</td>"
        f"<td class='num'>{human_bytes(part.nbytes)}<br>{human_bytes(part.device_bytes)} each</td>"
        f"<td>{_picture(found, names)}</td></tr>"
    )


def _picture(found: Sequence[Piece], names: Sequence[str]) -> str:
    rows, spans = grid(found), []
    hue = lambda i: f"hsl({210 + 360 * i // len(found)} 45% 38%)"
    colours = {piece.box: hue(i) for i, piece in enumerate(found)}
    height = max(1.3, math.floor(4 / len(rows)))
    for piece in (piece for row in rows for piece in row):
        box = ", ".join(f"{a}:{b}" for a, b in piece.box)
        held = "; ".join(f"{d} ({names[d]})" for d in piece.devices)
        label = ",".join(map(str, piece.devices)) if len(piece.devices) < len(names) else "all"
        spans.append(
            f"<span style='background:{colours[piece.box]}' "
            f"title='[{box}] on {html.escape(held)}'>{label}</span>"
        )
    columns = f"grid-template-columns:repeat({max(map(len, rows))},1fr)"
    return (
        f"<div class='weight' style='{columns};grid-auto-rows:{height}rem'>{''.join(spans)}</div>"
    )

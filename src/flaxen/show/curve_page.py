"""Curves of runs as one HTML file: drawn as SVG, numbers under the pointer by a few lines of
script, nothing from the network.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence

from flaxen.show.curves import Curve, Panel
from flaxen.show.plot import colour

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 34

Place = Callable[[float], float]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem }
.panels { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)) }
h2 { font-size: 1rem; margin: 0 }
svg { height: auto; width: 100% }
.axis { fill: #555; font-size: 11px }
.grid { stroke: #ddd }
.told { font-size: .8rem; min-height: 3.2em; white-space: pre-wrap }
.run { border-left: 1rem solid; margin-right: 1.5rem; padding-left: .4rem }
"""

SCRIPT = """
for (const box of document.querySelectorAll(".panel")) {
  const data = JSON.parse(box.querySelector("script").textContent);
  const svg = box.querySelector("svg"), told = box.querySelector(".told");
  const line = svg.querySelector(".pointer");
  svg.addEventListener("pointermove", event => {
    const place = svg.getBoundingClientRect();
    const at = (event.clientX - place.left) / place.width * data.width;
    const share = (at - data.left) / (data.width - data.left - data.right);
    const x = data.low + share * (data.high - data.low);
    line.setAttribute("x1", at); line.setAttribute("x2", at);
    line.setAttribute("visibility", share < 0 || share > 1 ? "hidden" : "visible");
    told.textContent = data.curves.map(curve => {
      let low = 0, high = curve.x.length - 1;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (curve.x[middle] < x) low = middle; else high = middle;
      }
      const i = x - curve.x[low] < curve.x[high] - x ? low : high;
      const y = curve.y[i];
      return `${curve.label}: ${y === null ? "not finite" : y} at ${curve.x[i]}`;
    }).join("\\n");
  });
}
"""


def curves_page(panels: Sequence[Panel], x: str, *, log_y: bool = False) -> str:
    """The page as text."""
    labels = {c.run: c.label for panel in panels for c in reversed(panel.curves)}
    runs = "".join(
        f"<span class='run' style='border-color:{colour(run)}'>{html.escape(label)}</span>"
        for run, label in sorted(labels.items())
    )
    title = "Curves of " + ", ".join(labels[run] for run in sorted(labels))
    screen = "<meta name='viewport' content='width=device-width'>"
    head = f"<meta charset='utf-8'>{screen}<title>{html.escape(title)}</title>"
    body = "".join(_panel(panel, x, log_y) for panel in panels)
    return (
        f"<!doctype html><html lang='en'><head>{head}<style>{STYLE}</style></head>"
        f"<body><p>{runs}</p><div class='panels'>{body}</div><script>{SCRIPT}</script>"
        "</body></html>\n"
    )


def _panel(panel: Panel, x: str, log_y: bool) -> str:
    points = [xy for curve in panel.curves for xy in _shown(curve.x, curve.y, log_y)]
    low, high = _span([a for a, _ in points])
    floor, roof = _span([_scale(b, log_y) for _, b in points])
    across = lambda a: LEFT + (a - low) / (high - low) * (WIDTH - LEFT - RIGHT)
    down = lambda b: TOP + (roof - _scale(b, log_y)) / (roof - floor) * (HEIGHT - TOP - BOTTOM)
    parts = [f"<svg viewBox='0 0 {WIDTH} {HEIGHT}'>"]
    for tick in ticks(low, high):
        at, bottom = across(tick), HEIGHT - BOTTOM
        parts.append(f"<line class='grid' x1='{at:.1f}' x2='{at:.1f}' y1='{TOP}' y2='{bottom}'/>")
        parts.append(_text(at, bottom + 14, _short(tick), "middle"))
    for tick in ticks(floor, roof):
        value = 10**tick if log_y else tick
        at = down(value)
        end = WIDTH - RIGHT
        parts.append(f"<line class='grid' x1='{LEFT}' x2='{end}' y1='{at:.1f}' y2='{at:.1f}'/>")
        parts.append(_text(LEFT - 6, at + 4, _short(value), "end"))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 4, x, "middle"))
    for curve in panel.curves:
        parts += _lines(curve, across, down, log_y)
    parts.append(
        f"<line class='pointer' stroke='#888' y1='{TOP}' y2='{HEIGHT - BOTTOM}' "
        "visibility='hidden'/></svg>"
    )
    name = html.escape(panel.metric)
    return (
        f"<div class='panel'><h2>{name}</h2>{''.join(parts)}<div class='told'></div>"
        f"<script type='application/json'>{_data(panel, low, high)}</script></div>"
    )


def _lines(curve: Curve, across: Place, down: Place, log_y: bool) -> list[str]:
    one, out = colour(curve.run), []
    drawn = [(curve.y, 0.25, 1)] if curve.smooth is not curve.y else []
    for values, opacity, width in [*drawn, (curve.smooth, 1, 2)]:
        path, pen = [], "M"
        for a, b in zip(curve.x, values, strict=True):
            if not _can(b, log_y):
                pen = "M"  # a gap
                continue
            path.append(f"{pen}{across(a):.1f} {down(b):.1f}")
            pen = "L"
        dashes = " stroke-dasharray='5 4'" if curve.tests else ""
        out.append(
            f"<path d='{''.join(path)}' fill='none' stroke='{one}' stroke-width='{width}' "
            f"stroke-opacity='{opacity}'{dashes}/>"
        )
    if curve.tests or len(curve.x) == 1:
        out += [
            f"<circle cx='{across(a):.1f}' cy='{down(b):.1f}' r='3' fill='{one}'/>"
            for a, b in _shown(curve.x, curve.y, log_y)
        ]
    return out


def _data(panel: Panel, low: float, high: float) -> str:
    """What the script reads; `<` could end the element."""
    curves = [
        {
            "label": curve.label,
            "x": [float(f"{a:.6g}") for a in curve.x],
            "y": [float(f"{b:.5g}") if math.isfinite(b) else None for b in curve.y],
        }
        for curve in panel.curves
    ]
    sizes = {"low": low, "high": high, "width": WIDTH, "left": LEFT, "right": RIGHT}
    return json.dumps(sizes | {"curves": curves}).replace("<", "\\u003c")


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers between two, about so many: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Least and greatest, apart."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    return low, high


def _can(value: float, log_y: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log_y)


def _shown(xs: Sequence[float], ys: Sequence[float], log_y: bool) -> list[tuple[float, float]]:
    return [(a, b) for a, b in zip(xs, ys, strict=True) if _can(b, log_y)]


def _scale(value: float, log_y: bool) -> float:
    return math.log10(value) if log_y else value


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return (
        f"<text class='axis' x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>"
        f"{html.escape(text)}</text>"
    )


def _short(value: float) -> str:
    return f"{value:.4g}"

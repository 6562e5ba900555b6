"""`flaxen plot`: the curves of one run or of several, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from flaxen.cli.options import Json, about
from flaxen.cli.output import print_json, print_out, remark
from flaxen.core.errors import InputError
from flaxen.core.whole_file import whole_file


def plot(
    runs: Annotated[list[str], about("Folders that `flaxen train` wrote, or their log.jsonl.")],
    *,
    output: Annotated[str, about("A .png or .html file.")] = "curves.html",
    metric: Annotated[
        list[str] | None,
        about("What is drawn: loss grad_norm ...; default: the usual.", consume_multiple=True),
    ] = None,
    smooth: Annotated[float, about("Of the running mean, kept by each point; 0: none.")] = 0.9,
    x: Annotated[Literal["step", "tokens", "seconds"], about("What it is drawn over.")] = "step",
    log_y: Annotated[bool, about("Values on a logarithmic scale.")] = False,
    json: Json = False,
) -> int:
    """Draw the curves of runs: a page that opens in any browser, or a picture.

    With --json, what was drawn is told in numbers too: first, last, least and greatest.
    """
    from flaxen.show import curves_page, curves_picture
    from flaxen.show.curves import open_runs, panels, summary

    target = Path(output)
    if target.suffix not in (".png", ".html"):
        raise InputError(f"--output is {output!r}; expected a name that ends in .png or .html.")
    logs = open_runs(runs)
    drawn = panels(logs, metric or (), x, smooth)
    try:
        if target.suffix == ".png":
            curves_picture(drawn, target, x, log_y=log_y)
        else:
            write(target, curves_page(drawn, x, log_y=log_y))
    except OSError as error:
        raise InputError(f"--output {output} cannot be written: {error.strerror}.") from error
    told = summary(logs, [panel.metric for panel in drawn])
    if json:
        print_json({"output": target, "runs": told})
        return 0
    for run in told:
        ends = [f"{name} {n['first']:.4g} → {n['last']:.4g}" for name, n in run["metrics"].items()]
        print_out(f"{run['run']}: step {run['step']}, {', '.join(ends) or 'nothing of that'}")
    remark(f"Curves: {target}")
    return 0


def write(path: Path, text: str) -> None:
    """A file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")

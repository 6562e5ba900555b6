"""`flaxen diff`: are two checkpoints equal, and if not, where and by how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from flaxen.cli.options import Count, Json, Source, about
from flaxen.cli.output import print_json, print_mark, print_out
from flaxen.core.progress import reporting

if TYPE_CHECKING:
    from flaxen.convert.compare import Comparison, Difference
    from flaxen.convert.formats.checkpoint import Checkpoint

ROWS = 20


def diff(
    first: Source,
    second: Source,
    *,
    weights: Annotated[
        bool, about("Compare what a model makes of them: other layouts and names are equal.")
    ] = False,
    rows: Annotated[Count, about("Print this many tensors, the farthest apart first.")] = ROWS,
    json: Json = False,
) -> int:
    """Tell whether two checkpoints are equal, which tensors differ and how far.

    Values are compared under the names of the files, whatever their format. The exit status is 1 if
    anything differs.
    """
    from flaxen.convert.compare import compare
    from flaxen.convert.formats.checkpoint import open_checkpoint

    a, b = open_checkpoint(first), open_checkpoint(second)
    one, other = (_weights(a), _weights(b)) if weights else (a, b)
    total = sum(one[name].nbytes for name in one if name in other)
    with reporting(True, "Comparing", total) as progress:
        found = compare(one, other, progress)
    config = _config(a, b)
    if json:
        print_json({**dataclasses.asdict(found), "config": config})
    else:
        _print(found, config, rows)
    return int(not found.same or bool(config))


def _weights(checkpoint: Checkpoint) -> Mapping[str, Any]:
    from flaxen.fit import fit

    found = fit(checkpoint)
    found.report.raise_if_bad()
    return found.weights


def _config(a: Checkpoint, b: Checkpoint) -> dict[str, list[Any]]:
    """Config keys that differ, with both values; None where there is no such key."""
    from flaxen.families.rope_keys import both_spellings

    # What conversion adds for older readers says nothing new.
    one, other = both_spellings(a.config), both_spellings(b.config)
    keys = sorted({*one, *other} - {"transformers_version"})
    return {key: [one.get(key), other.get(key)] for key in keys if one.get(key) != other.get(key)}


def _print(found: Comparison, config: dict[str, list[Any]], rows: int) -> None:
    from flaxen.convert.report import fold
    from flaxen.show import table

    worst = sorted(found.different, key=lambda d: (d.shapes[0] == d.shapes[1], -d.relative))
    if worst:
        headers = ["tensor", "shape", "dtype", "elements differ", "largest", "relative"]
        print_out(table(headers, [_row(each) for each in worst[:rows]]))
    if len(worst) > rows:
        print_out(f"... and {len(worst) - rows} more (--rows)")
    for which, names in (("first", found.only_first), ("second", found.only_second)):
        for name in fold(names):
            print_out(f"only in the {which}: {name}")
    for key, (one, other) in config.items():
        print_out(f"config: {key} is {one!r} and {other!r}")
    if found.same and not config:
        print_mark(True, f"equal, all {found.equal} tensors bit for bit")
    else:
        print_out(f"{found.equal} tensors equal, {len(found.different)} different")


def _row(each: Difference) -> tuple[str, ...]:
    def either(values: tuple[Any, Any]) -> str:
        one, other = map(str, values)
        return one if one == other else f"{one} / {other}"

    shape = either((list(each.shapes[0]), list(each.shapes[1])))
    if each.shapes[0] != each.shapes[1]:
        return each.name, shape, either(each.dtypes), "-", "-", "-"
    share = f"{each.elements} ({each.elements / max(each.size, 1):.1%})"
    return (
        each.name,
        shape,
        either(each.dtypes),
        share,
        f"{each.largest:.3g}",
        f"{each.relative:.3g}",
    )

"""`flaxen families`: the model types that load, and a starting file for another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from flaxen.cli.options import Json, about
from flaxen.cli.output import print_json, print_out, remark, write_now
from flaxen.core.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table


def families(
    action: Annotated[str | None, about("`new` prints a starting file; default: a list.")] = None,
    name: Annotated[str | None, about("The model type of the new family.")] = None,
    *,
    like: Annotated[str, about("The family that it resembles most.")] = "llama",
    json: Json = False,
) -> None:
    """List the model types that load, or print a starting file for a new one.

    flaxen families new my_model --like qwen3 > src/flaxen/families/my_model.py
    """
    if action is None:
        rows = _rows()
        print_json(rows) if json else print_out(_table(rows))
        return
    if action != "new" or name is None:
        found = f"{action!r} is not known" if action != "new" else "`new` lacks a name"
        raise InputError(
            f"{found}; write `flaxen families` for a list, or `flaxen families new NAME --like "
            "qwen3`."
        )
    from flaxen.show.family_source import starting_file

    write_now(starting_file(name, like))
    remark(
        f"Save it as families/<lineage>.py, add {name!r} to FILES in families/__init__.py, change "
        "what differs, and compare with the reference: docs/adding-a-family.md."
    )


def _rows() -> list[dict[str, str | int]]:
    from flaxen.families import FILES
    from flaxen.show.family_source import length

    return [{"model_type": t, "file": FILES[t], "lines": length(t)} for t in sorted(FILES)]


def _table(rows: list[dict[str, str | int]]) -> Table:
    from rich.table import Table

    table = Table("model type", "file", "lines", title=f"{len(rows)} model types")
    for row in rows:
        table.add_row(str(row["model_type"]), f"families/{row['file']}.py", str(row["lines"]))
    return table

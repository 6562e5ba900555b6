"""One flag for each setting of a run, made of the settings themselves."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from flaxen.cli.options import Count
from flaxen.core.errors import InputError
from flaxen.train.settings import RunConfig
from flaxen.train.settings.field import described


def _flags() -> type:
    """A dataclass of every setting that has a flag; None is what was not given."""
    hints = typing.get_type_hints(RunConfig)
    fields = [
        (field.name, _annotated(field, hints[field.name]), None)
        for field in dataclasses.fields(RunConfig)
        if field.metadata["flag"]
    ]
    namespace = {"__module__": __name__}
    made = dataclasses.make_dataclass(
        "Flags", fields, frozen=True, kw_only=True, namespace=namespace
    )
    return Parameter(name="*")(made)


def _annotated(field: Any, hint: Any) -> Any:
    flag, text = field.metadata["flag"], described(field)
    if field.default not in (None, dataclasses.MISSING):
        text += f" Default: {str(field.default).lower()}."
    kind = hint if flag is True else flag
    switch = kind is bool
    negative = f"--no-{field.name.replace('_', '-')}" if switch else ()
    kind = Count if kind in (int, int | None) else kind
    return Annotated[kind | None, Parameter(help=text, negative=negative)]


Flags: Any = _flags()


def given(flags: Any) -> dict[str, Any]:
    """The settings that were given, by name."""
    values = {field.name: getattr(flags, field.name) for field in dataclasses.fields(flags)}
    values = {name: value for name, value in values.items() if value is not None}
    targets = values.get("lora_targets")
    if targets and len(targets) == 1 and not re.fullmatch(r"\w+", targets[0]):
        # One that is no name is an expression for whole paths.
        values["lora_targets"] = targets[0]
    if "columns" in values:
        values["columns"] = as_mapping(values["columns"])
    return values


def as_mapping(pairs: Sequence[str] | None) -> dict[str, str] | None:
    """`ours=theirs` of each, as a mapping.

    Raises:
        InputError: one without `=`.
    """
    if not pairs:
        return None
    wrong = next((pair for pair in pairs if "=" not in pair), None)
    if wrong is not None:
        raise InputError(f"--columns {wrong!r} lacks a '='; write for example prompt=instruction.")
    return dict(pair.split("=", 1) for pair in pairs)

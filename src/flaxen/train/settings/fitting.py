"""Values of a file or of flags, made what their settings are."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from flaxen.core.errors import ConfigError, did_you_mean
from flaxen.train.settings.field import choices_of, spelled

NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
NAMES |= {list: "a list", dict: "a mapping"}


def fitted(kind: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values by name, each as the dataclass `kind` has it.

    Raises:
        ConfigError: naming every unknown key and every value of another kind.
    """
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    out, wrong = {}, []
    for key, value in values.items():
        if key not in fields:
            wrong.append(f"unknown key {key!r}.{did_you_mean(str(key), fields)}")
            continue
        try:
            out[key] = _chosen(fit(value, hints[key]), fields[key])
        except ValueError as error:
            wrong.append(f"{key} is {value!r}, expected {error}")
    if wrong:
        raise ConfigError(f"{where}: " + "\n  ".join(["", *wrong]).lstrip() + _end(wrong))
    return out


def _chosen(value: Any, field: dataclasses.Field[Any]) -> Any:
    """The choice that a text spells: 4 and "4" are the same."""
    choices = choices_of(field) if isinstance(value, str) else None
    return next((x for x in choices or () if spelled(x) == value), value)


def _end(wrong: Sequence[str]) -> str:
    return "" if wrong[-1].endswith((".", "?")) else "."


def fit(value: Any, hint: Any) -> Any:
    """A value as one of the types of a hint; YAML has no 1e-4, and flags have text.

    Raises:
        ValueError: saying what was expected.
    """
    kinds = _kinds(hint)
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, list | tuple) and list in kinds:
        return [_inside(x, hint, Sequence, -1) for x in value]
    if isinstance(value, dict) and dict in kinds:
        return {
            _inside(key, hint, Mapping, 0): _inside(x, hint, Mapping, -1)
            for key, x in value.items()
        }
    if type(value) in kinds:
        return value
    if type(value) is int and float in kinds:
        return float(value)
    if (isinstance(value, str) and str not in kinds) or (isinstance(value, str) and bool in kinds):
        for kind in (k for k in (int, float) if k in kinds):
            with contextlib.suppress(ValueError):
                return kind(value.replace("_", ""))
    if isinstance(value, float) and value.is_integer() and int in kinds:
        return int(value)
    raise ValueError(" or ".join(NAMES[k] for k in NAMES if k in kinds))


def _inside(value: Any, hint: Any, kind: type, which: int) -> Any:
    """What a list or mapping holds, as the `which`-th argument of its own hint says."""
    for each in (hint, *typing.get_args(hint)):
        origin = typing.get_origin(each)
        if not isinstance(origin, type) or not issubclass(origin, kind):
            continue
        wanted = typing.get_args(each)[which]
        if wanted is Any:
            return value
        try:
            return fit(value, wanted)
        except ValueError as error:
            what = "key" if kind is Mapping and which == 0 else "entry"
            raise ValueError(f"of each {what} {error}, not {value!r}") from None
    return value


def _kinds(hint: Any) -> set[type]:
    """The plain types of a hint; every sequence is a list."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(_kinds, typing.get_args(hint)))
    kind = origin or hint
    if kind is str or not isinstance(kind, type):
        return {str}
    if issubclass(kind, Mapping):
        return {dict}
    if issubclass(kind, Sequence):
        return {list}
    return {kind}

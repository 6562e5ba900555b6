"""Trees of frozen dataclasses as plain data (JSON) and back: exactly, and never by executing."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from jax.sharding import PartitionSpec

from flaxen.core.errors import ConfigError, did_you_mean

T = TypeVar("T")
Path = tuple[str, ...]


def to_plain(value: Any, path: Path = ()) -> Any:
    """Dicts, lists, strings, numbers, booleans and None.

    Raises:
        ConfigError: something that is no data, such as a function.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: to_plain(getattr(value, f.name), (*path, f.name))
            for f in dataclasses.fields(value)
        }
    if isinstance(value, tuple | PartitionSpec):
        return [to_plain(item, path) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ConfigError(
        f"{_named(path)} holds a {type(value).__name__}, which cannot be written as data. Give it "
        "by a name or a description instead."
    )


def from_plain(kind: type[T], data: Any, path: Path = ()) -> T:
    """What `to_plain` was given. Fields that are absent have their defaults.

    Raises:
        ConfigError: an unknown field, a value of another kind than the field's, or none where there
            is no default.
    """
    if not isinstance(data, Mapping):
        raise _odd(path, data, "an object")
    hints = _hints(kind)
    check_names(data, hints, ".".join(path) or kind.__name__)
    parameters = inspect.signature(kind).parameters.values()
    lacking = [p.name for p in parameters if p.default is p.empty and p.name not in data]
    if lacking:
        raise ConfigError(f"{_named(path)} lacks {', '.join(map(repr, lacking))}.")
    return kind(**{key: _value(hints[key], data[key], (*path, key)) for key in data})


def check_names(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """
    Raises:
        ConfigError: listing each given name that is not known, and the nearest one that is.
    """
    known = list(known)
    unknown = [name for name in given if name not in known]
    if unknown:
        listed = " ".join(f"{name!r} is unknown.{did_you_mean(name, known)}" for name in unknown)
        raise ConfigError(f"{where}: {listed}")


def differences(value: Any, default: Any, path: Path = ()) -> list[tuple[str, Any]]:
    """(dotted name, value) of each field that is not as in `default`, looked for inside of fields
    that are of one kind.
    """
    found: list[tuple[str, Any]] = []
    for field in dataclasses.fields(value):
        mine, other = getattr(value, field.name), getattr(default, field.name)
        name = (*path, field.name)
        if dataclasses.is_dataclass(mine) and type(mine) is type(other):
            found += differences(mine, other, name)
        elif mine != other:
            found.append((".".join(name), mine))
    return found


def value_at(value: Any, name: str) -> Any:
    """The field of a dotted name: `attention.blocks.q`."""
    return functools.reduce(getattr, name.split("."), value)


def with_values(value: T, changes: Mapping[str, Any]) -> T:
    """The same tree with other fields, by dotted name, all changed at once."""
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, new in changes.items():
        first, _, rest = name.partition(".")
        if rest:
            inner.setdefault(first, {})[rest] = new
        else:
            own[first] = new
    nested = {name: with_values(getattr(value, name), each) for name, each in inner.items()}
    return dataclasses.replace(value, **own, **nested)  # type: ignore[type-var]


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _value(hint: Any, data: Any, path: Path) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if option is type(None) and data is None:
            return None
        if dataclasses.is_dataclass(option) and isinstance(data, Mapping):
            return from_plain(option, data, path)
        if option is PartitionSpec and isinstance(data, list):
            return PartitionSpec(*(_entry(entry, path) for entry in data))
        if typing.get_origin(option) is tuple and isinstance(data, list):
            return _tuple(typing.get_args(option), data, path)
        if type(data) is option or (option is float and type(data) is int):
            return data
    raise _odd(path, data, " or ".join(getattr(o, "__name__", str(o)) for o in options))


def _tuple(kinds: tuple[Any, ...], data: list[Any], path: Path) -> tuple[Any, ...]:
    if len(kinds) == 2 and kinds[1] is ...:
        return tuple(_value(kinds[0], item, path) for item in data)
    if len(kinds) != len(data):
        raise _odd(path, data, f"{len(kinds)} items")
    return tuple(_value(kind, item, path) for kind, item in zip(kinds, data, strict=True))


def _entry(entry: Any, path: Path) -> Any:
    """One dimension of a PartitionSpec: None, a mesh axis, or several."""
    if isinstance(entry, list) and all(isinstance(axis, str) for axis in entry):
        return tuple(entry)
    if entry is None or isinstance(entry, str):
        return entry
    raise _odd(path, entry, "a mesh axis, a list of them, or null")


def _odd(path: Path, found: Any, expected: str) -> ConfigError:
    return ConfigError(f"{_named(path)} is {found!r}; expected {expected}.")


def _named(path: Path) -> str:
    return ".".join(path) or "The value"

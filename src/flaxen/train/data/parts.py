"""What data is asked for: files, globs, folders and datasets of the hub, each with its weight."""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flaxen.core.errors import InputError, did_you_mean
from flaxen.train.data.files import KINDS_OF_FILES, kind_of_file
from flaxen.train.data.hub import HubData, hub_data

KEYS = ("path", "weight", "columns", "config", "split", "revision")
"""What an entry of `data` may say."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Files, or a dataset of the hub. weight: its share of the rows of a mixture, or None; columns:
    what the fields of a record are called there.
    """

    name: str
    files: tuple[Path, ...] = ()
    hub: HubData | None = None
    weight: float | None = None
    columns: tuple[tuple[str, str], ...] = ()


def parts_of(data: Any, columns: Mapping[str, str] | None = None) -> tuple[Part, ...]:
    """data: a path, glob, folder, `hf:` name or an entry with `KEYS`; or a list of them. A path may
    end in `=3`, which is its weight. columns: those of the entries that name none.

    Raises:
        InputError: what is not there, by its name; weights of some entries but not of others.
    """
    single = isinstance(data, str | os.PathLike | Mapping)
    entries = [data] if single else list(data)
    if not entries:
        raise InputError("There is no data: the list is empty.")
    parts = tuple(_part(entry, columns) for entry in entries)
    without = [part.name for part in parts if part.weight is None]
    if without and len(without) < len(parts):
        raise InputError(
            f"{', '.join(without)} has no weight, but other data has; give all or none."
        )
    return parts


def names_of(data: Any) -> list[str]:
    """The last words of what data is asked for by; nothing is looked up."""
    entries = [data] if isinstance(data, str | os.PathLike | Mapping) else list(data)
    paths = [
        entry["path"] if isinstance(entry, Mapping) else _weighted(os.fspath(entry))[0]
        for entry in entries
    ]
    return [Path(path).name for path in paths]


def _part(entry: Any, columns: Mapping[str, str] | None) -> Part:
    if not isinstance(entry, str | os.PathLike | Mapping):
        raise InputError(f"data has {entry!r}; expected a path, or a mapping with one.")
    if not isinstance(entry, Mapping):
        path, weight = _weighted(os.fspath(entry))
        entry = {"path": path} | ({"weight": weight} if weight is not None else {})
    unknown = next((key for key in entry if key not in KEYS), None)
    if unknown is not None:
        raise InputError(f"data has an unknown key {unknown!r}.{did_you_mean(unknown, KEYS)}")
    path, weight = entry.get("path"), entry.get("weight")
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise InputError(f"The data {dict(entry)!r} has no path.")
    if weight is not None and (isinstance(weight, bool) or not _positive(weight)):
        raise InputError(f"The weight of {path} is {weight!r}; expected a number above 0.")
    renamed = entry.get("columns", columns) or {}
    if not isinstance(renamed, Mapping) or not all(isinstance(x, str) for x in renamed.values()):
        raise InputError(f"The columns of {path} are {renamed!r}; expected a name for each field.")
    path = os.fspath(path)
    more = {key: entry[key] for key in ("config", "split", "revision") if entry.get(key)}
    common: Any = {"weight": weight, "columns": tuple(sorted(renamed.items()))}
    if path.startswith("hf:") or (not _is_here(path) and _names_a_dataset(path)):
        return Part(path, hub=hub_data(path.removeprefix("hf:"), **more), **common)
    if more:
        raise InputError(f"{path} is a file, which has no {' or '.join(more)}.")
    return Part(path, tuple(_files(path)), **common)


def _weighted(path: str) -> tuple[str, float | None]:
    match = re.fullmatch(r"(.+)=(\d+(?:\.\d+)?)", path)
    return (path, None) if match is None or _is_here(path) else (match[1], float(match[2]))


def _positive(weight: Any) -> bool:
    return isinstance(weight, int | float) and 0 < weight < float("inf")


def _is_here(path: str) -> bool:
    return Path(path).expanduser().exists()


def _names_a_dataset(path: str) -> bool:
    """As the hub writes it: `owner/name`, and not what looks like a file."""
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path)) and kind_of_file(path) is None


def _files(path: str) -> Iterator[Path]:
    """
    Raises:
        InputError: there is none, or one of an unknown kind.
    """
    here = Path(path).expanduser()
    if here.is_dir():
        inside = sorted(p for p in here.rglob("*") if p.is_file() and kind_of_file(p))
        found = [p for p in inside if not any(x.startswith(".") for x in p.relative_to(here).parts)]
        if not found:
            raise InputError(f"The folder {path} has no file of {KINDS_OF_FILES}.")
    elif here.exists():
        found = [here]
    elif glob.has_magic(path):
        found = sorted(p for p in map(Path, glob.glob(str(here), recursive=True)) if p.is_file())
        if not found:
            raise InputError(f"No file is called like {path!r}.")
    else:
        raise InputError(f"There is no file {path!r} to learn from.")
    for file in found:
        if kind_of_file(file) is None:
            raise InputError(f"{file} is none of {KINDS_OF_FILES}; those can be trained on.")
        yield file


def weights_of(parts: Sequence[Part]) -> tuple[float, ...] | None:
    """Those of a mixture; None for parts that just follow one another."""
    weights = [part.weight for part in parts]
    return None if None in weights else tuple(float(w) for w in weights if w is not None)

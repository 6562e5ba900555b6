"""GGUF models in several files: `name-00001-of-00003.gguf` and its neighbours."""

from __future__ import annotations

import os
import re
from pathlib import Path

from flaxen.convert.formats.gguf_file import GgufFile
from flaxen.core.errors import CheckpointError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def read_parts(path: str | os.PathLike[str]) -> GgufFile:
    """The header of a GGUF file, or of the first part of several with the tensors of all.

    Raises CheckpointError for a part that is missing or belongs elsewhere.
    """
    file = GgufFile(path)
    count = file.metadata.get("split.count", 1)
    if not isinstance(count, int):
        raise CheckpointError(f"{file.path}: split.count is {count!r}, not a number.")
    # A file that was merged again says 0.
    if count <= 1:
        return file
    names = _names(Path(path), count)
    first, *others = (_part(name, number, count) for number, name in enumerate(names))
    for other in others:
        if twice := first.tensors.keys() & other.tensors.keys():
            raise CheckpointError(f"{other.path}: tensor {min(twice)!r} is in another part too.")
        first.tensors |= other.tensors
    expected = first.metadata.get("split.tensors.count", len(first.tensors))
    if not isinstance(expected, int) or len(first.tensors) != expected:
        raise CheckpointError(
            f"{first.path}: its {count} parts hold {len(first.tensors)} tensors, not the "
            f"{expected} that it names. Download the model again."
        )
    return first


def _names(path: Path, count: int) -> list[Path]:
    named = _PART.fullmatch(path.name)
    if not named or int(named[3]) != count:
        raise CheckpointError(
            f"{path}: one of {count} parts of a model, which must be named "
            f"NAME-00001-of-{count:05}.gguf and so on."
        )
    names = [path.with_name(f"{named[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if missing := [name.name for name in names if not name.is_file()]:
        raise CheckpointError(
            f"{path}: one of {count} parts of a model; missing beside it: {', '.join(missing)}."
        )
    return names


def _part(path: Path, number: int, count: int) -> GgufFile:
    file = GgufFile(path)
    found = file.metadata.get("split.no"), file.metadata.get("split.count")
    if found != (number, count):
        raise CheckpointError(
            f"{path}: says it is part {found[0]} (from 0) of {found[1]}; by its name it is "
            f"{number} of {count}."
        )
    return file

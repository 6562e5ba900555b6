"""Folders in which one file, or an index and its shards, holds the tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from flaxen.convert.formats.checkpoint import Checkpoint, read_json
from flaxen.convert.formats.foreign import foreign
from flaxen.convert.formats.source import FileMap
from flaxen.convert.lazy import ByteCounter, LazyTensor
from flaxen.core.errors import CheckpointError

TRIES = 16
"""Times that a folder is opened which others replace."""

Read = Callable[[FileMap], tuple[dict[str, LazyTensor], dict[str, Any]]]
"""The tensors of one file by name, and the format's own metadata."""


def open_folder(path: Path, kind: str, single: str, index: str, read: Read) -> Checkpoint:
    """Open one file, or a folder with the file `single`, or with `index` and the shards it names;
    `kind` is the name of the format.

    All files are of one folder: should another take its place meanwhile, as a save does, that one
    is opened.

    Raises:
        CheckpointError: a file is absent, damaged, or at odds with the index.
    """
    folder = path if path.is_dir() else path.parent
    for _ in range(TRIES):
        with _in_place(folder) as stands:
            try:
                found = _opened(path, folder, kind, single, index, read)
            except (CheckpointError, FileNotFoundError):
                if stands():
                    raise
                continue
            if stands():
                return found
            found.close()
    raise CheckpointError(f"{folder} is replaced again and again. Wait until that has ended.")


@contextlib.contextmanager
def _in_place(folder: Path) -> Iterator[Callable[[], bool]]:
    """Tells whether the path still names the same folder; being open, it keeps its number."""
    descriptor = os.open(folder, os.O_RDONLY)

    def stands() -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(folder))
        except FileNotFoundError:
            return False

    try:
        yield stands
    finally:
        os.close(descriptor)


def _opened(path: Path, folder: Path, kind: str, single: str, index: str, read: Read) -> Checkpoint:
    shards, wanted = _files(path, single, index)
    counter, files = ByteCounter(), ExitStack()
    tensors: dict[str, LazyTensor] = {}
    metadata: dict[str, Any] = {}
    with ExitStack() as on_error:
        on_error.callback(files.close)
        for shard in shards:
            source = FileMap(shard, counter)
            files.callback(source.close)
            found, extra = read(source)
            metadata |= extra
            for name in wanted[shard.name] if wanted else found:
                if name not in found:
                    raise CheckpointError(
                        f"{folder / index} says that {name!r} is in {shard.name}, but it is not. "
                        "Fetch both files again, from the same revision."
                    )
                tensors[name] = found[name]
        config, generation = (
            read_json(folder / name) if (folder / name).is_file() else None
            for name in ("config.json", "generation_config.json")
        )
        on_error.pop_all()
    return Checkpoint(
        tensors,
        counter=counter,
        config=config,
        generation_config=generation,
        folder=folder,
        format=kind,
        files=shards,
        metadata=metadata,
        close=files.close,
    )


def _files(path: Path, single: str, index: str) -> tuple[list[Path], dict[str, list[str]] | None]:
    """The files that make up a checkpoint, and by file the names that an index wants of it."""
    if path.is_file():
        return [path], None
    if (path / single).is_file():
        return [path / single], None
    if (path / index).is_file():
        return _indexed(path / index)
    found = sorted(p.name for p in path.iterdir())
    if "adapter_config.json" in found:
        raise CheckpointError(
            f"{path} holds an adapter, not a model. flaxen.load puts it on top of the model that "
            "it names; for anything else, merge it (flaxen.tune.merge) and save the model."
        )
    raise CheckpointError(
        f"{path} holds neither {single} nor {index}, only {', '.join(found[:8]) or 'nothing'}."
        f"{foreign(found) or ' Pass a folder with weights.'}"
    )


def _indexed(index: Path) -> tuple[list[Path], dict[str, list[str]]]:
    wanted = wanted_by_file(read_json(index), index)
    absent = sorted(file for file in wanted if not os.path.isfile(index.parent / file))
    if absent:
        raise CheckpointError(
            f"{index} names files that are not there: {', '.join(absent)}. "
            f"Fetch them into {index.parent}."
        )
    return [index.parent / file for file in sorted(wanted)], wanted


def wanted_by_file(index: dict[str, Any], where: str | Path) -> dict[str, list[str]]:
    """The names that an index, read from `where`, puts into each file beside it."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where} has no weight_map, so no tensor can be found by it.")
    wanted: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{where} puts {name!r} in {file!r}, which is no file name.")
        wanted.setdefault(file, []).append(name)
    return wanted

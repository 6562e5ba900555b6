"""Hugging Face folders: streamed out in chunks, complete before they replace the old one."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.convert.formats.safetensors import INDEX, SINGLE
from flaxen.convert.formats.subbyte import storable
from flaxen.convert.formats.writing import KINDS, Layout
from flaxen.convert.lazy import LazyTensor, is_float
from flaxen.convert.together import Alone, Processes, agreed, replacing_together
from flaxen.core.errors import CheckpointError

BESIDE = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
    "preprocessor_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
    "[0-9]_*/pytorch_model.bin",
)
"""Small files that belong to a model but not to its weights."""

OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def write_checkpoint(
    tensors: Mapping[str, LazyTensor],
    folder: str | Path,
    *,
    held: Mapping[str, LazyTensor] | None = None,
    config: dict[str, Any] | None = None,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    generation_config: dict[str, Any] | None = None,
    copy_from: Path | None = None,
    write_beside: Callable[[Path], Any] | None = None,
    dtype: Any = None,
    kept: Container[str] = (),
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a folder that Transformers loads.

    The folder changes all at once when everything is written; until then, whatever happens, the
    old one stays. Files in it that are no weights of ours are kept; tokenizer files and the like
    are copied from `copy_from`, and `write_beside` may write more into the folder it is given.
    `dtype` converts floats only, but those `kept`, and the config then says so.

    held: given where all processes of `jax.distributed` write together, each what it has: booleans,
    true for the elements of a tensor that are this process's to write. All call this alike.

    Raises:
        CheckpointError: a dtype that the format does not have, no such size as `max_shard_size`, or
        a folder that cannot be written, by this process or another.
    """
    casts = lambda name, tensor: dtype and is_float(tensor.dtype) and name not in kept
    cast = {n: t.astype(dtype) if casts(n, t) else t for n, t in tensors.items()}
    cast = {n: storable(t) for n, t in cast.items()}
    for name, tensor in cast.items():
        if tensor.dtype not in KINDS:
            raise CheckpointError(f"{name!r} is {tensor.dtype}, which safetensors cannot hold.")
    shards = _shards(cast, _bytes(max_shard_size))
    about = {"format": "pt", **(metadata or {})}
    files = {file: Layout.of({n: cast[n] for n in names}, about) for file, names in shards.items()}
    team = Alone() if held is None else Processes()
    with replacing_together(Path(folder), _ours, team) as target:
        with agreed(team):
            if team.index == 0:
                if copy_from is not None:
                    _copy_beside(copy_from, target)
                if write_beside is not None:
                    _write_beside(write_beside, target)
                if config is not None:
                    _write_json(target / "config.json", with_dtype(config, cast, dtype))
                if generation_config is not None:
                    _write_json(target / "generation_config.json", generation_config)
                if len(shards) > 1:
                    _write_json(target / INDEX, _index(cast, shards))
                for file, layout in files.items():
                    layout.begin(target / file)
        written = 0
        with agreed(team):
            for file, layout in files.items():
                written += layout.fill(target / file, cast, held, progress)
        with agreed(team):
            total, expected = sum(map(int, team.gather(str(written)))), _nbytes(cast)
            if total != expected:
                raise CheckpointError(
                    f"{expected} bytes should have been written, the processes hold {total}."
                )


def with_dtype(
    config: dict[str, Any], tensors: Mapping[str, LazyTensor], dtype: Any
) -> dict[str, Any]:
    """The config, agreeing with the dtype asked for or else with what most float weights have."""
    if dtype is not None:
        return _set_dtype(config, np.dtype(dtype).name)
    weight: dict[str, int] = {}
    for tensor in tensors.values():
        if is_float(tensor.dtype) and tensor.dtype.itemsize > 1:
            weight[tensor.dtype.name] = weight.get(tensor.dtype.name, 0) + tensor.nbytes
    said = config.get("dtype") or config.get("torch_dtype")
    if said is None or not weight or said in weight:
        return config
    return _set_dtype(config, max(weight, key=lambda name: weight[name]))


def _set_dtype(config: dict[str, Any], name: str, outer: bool = True) -> dict[str, Any]:
    inner = {
        key: _set_dtype(value, name, outer=False) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    known = [key for key in ("dtype", "torch_dtype") if key in config]
    return inner | dict.fromkeys(known or (["dtype"] if outer else []), name)


def _ours(name: str) -> bool:
    return OURS.fullmatch(name) is not None


def _nbytes(tensors: Mapping[str, LazyTensor]) -> int:
    return sum(t.nbytes for t in tensors.values())


def _shards(tensors: Mapping[str, LazyTensor], limit: int) -> dict[str, list[str]]:
    """File name -> tensors, filled in order; a tensor above the limit has a file of its own."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        if groups[-1] and used + tensor.nbytes > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{i:05}-of-{count:05}.safetensors": g for i, g in enumerate(groups, 1)}


def _index(tensors: Mapping[str, LazyTensor], shards: dict[str, list[str]]) -> dict[str, Any]:
    where = {name: file for file, names in shards.items() for name in names}
    totals = {
        "total_parameters": sum(t.size for t in tensors.values()),
        "total_size": _nbytes(tensors),
    }
    return {"metadata": totals, "weight_map": dict(sorted(where.items()))}


def _bytes(size: int | str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?|)B?\s*", str(size).upper())
    nbytes = int(float(match[1]) * (_UNITS | _BINARY_UNITS)[match[2]]) if match else 0
    if nbytes < 1:
        raise CheckpointError(
            f"{size!r} is no size; write an integer above 0, or '5GB', '500MB', '2GiB'."
        )
    return nbytes


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.unlink(missing_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_beside(write: Callable[[Path], Any], target: Path) -> None:
    """Let files be written where none are, then give them their names in the folder."""
    aside = target / ".beside"
    aside.mkdir()
    write(aside)
    shutil.copytree(aside, target, dirs_exist_ok=True, copy_function=os.replace)
    shutil.rmtree(aside)


def _copy_beside(source: Path, target: Path) -> None:
    for pattern in BESIDE:
        for file in source.glob(pattern):
            if file.is_file():
                # A kept file is a hard link to the old one: replace the name, not the contents.
                copy = target / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                copy.unlink(missing_ok=True)
                shutil.copyfile(file, copy)

"""Hugging Face folders: streamed out in chunks, complete before they replace the old one."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flaxen.convert.formats.safetensors import DTYPES, INDEX, SINGLE
from flaxen.convert.formats.subbyte import kind_and_shape, storable
from flaxen.convert.lazy import ALIGNMENT, LazyTensor, aligned_empty, box_shape, is_float, whole
from flaxen.convert.swap import replacing
from flaxen.convert.views import slabs
from flaxen.core.errors import CheckpointError

CHUNK = 16 << 20
"""Bytes held in memory while writing."""

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
)
"""Small files that belong to a model but not to its weights."""

OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def write_checkpoint(
    tensors: Mapping[str, LazyTensor],
    folder: str | Path,
    *,
    config: dict[str, Any] | None = None,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    generation_config: dict[str, Any] | None = None,
    copy_from: Path | None = None,
    dtype: Any = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a folder that Transformers loads.

    The folder changes all at once when everything is written; until then, whatever happens, the
    old one stays. Files in it that are no weights of ours are kept; tokenizer files and the like
    are copied from `copy_from`. `dtype` converts floats only, and the config then says so.

    Raises:
        CheckpointError: a dtype that the format does not have, or no such size as `max_shard_size`.
    """
    cast = {n: t.astype(dtype) if dtype and is_float(t.dtype) else t for n, t in tensors.items()}
    cast = {n: storable(t) for n, t in cast.items()}
    for name, tensor in cast.items():
        if tensor.dtype not in _KINDS:
            raise CheckpointError(f"{name!r} is {tensor.dtype}, which safetensors cannot hold.")
    shards = _shards(cast, _bytes(max_shard_size))
    with replacing(Path(folder), ours=lambda name: OURS.fullmatch(name) is not None) as target:
        if copy_from is not None:
            _copy_beside(copy_from, target)
        if config is not None:
            _write_json(target / "config.json", with_dtype(config, cast, dtype))
        if generation_config is not None:
            _write_json(target / "generation_config.json", generation_config)
        for file, names in shards.items():
            part = {name: cast[name] for name in names}
            write_file(target / file, part, {"format": "pt", **(metadata or {})}, progress)
        if len(shards) > 1:
            _write_json(target / INDEX, _index(cast, shards))


def write_file(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    metadata: Mapping[str, str],
    progress: Callable[[int], None] | None = None,
) -> None:
    """One safetensors file, whose data start at a multiple of 64 bytes.

    Tensors whose size is a multiple of 64 come first, so that each starts at one too and can be
    used where it is mapped; the others follow by falling alignment.
    """
    ordered = sorted(tensors.items(), key=lambda item: -_alignment(item[1].nbytes))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in ordered:
        span = [at, at + tensor.nbytes]
        kind, shape = kind_and_shape(tensor, _KINDS)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": span}
        at = span[1]
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    raw += b" " * (-(len(raw) + 8) % ALIGNMENT)
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), np.frombuffer(len(raw).to_bytes(8, "little") + raw, np.uint8))
        for _, tensor in ordered:
            for chunk in _chunks(tensor):
                _write(file.fileno(), chunk)
                if progress is not None:
                    progress(chunk.nbytes)
        os.fsync(file.fileno())


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
        "total_size": sum(t.nbytes for t in tensors.values()),
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


def _alignment(nbytes: int) -> int:
    """The largest power of two up to 64 that divides a size."""
    return min(nbytes & -nbytes, ALIGNMENT) if nbytes else ALIGNMENT


def _chunks(tensor: LazyTensor) -> Iterator[np.ndarray]:
    """The tensor's bytes in order; each chunk is overwritten by the next one."""
    buffer = aligned_empty((min(CHUNK, tensor.nbytes),), np.dtype(np.uint8))
    for box, _ in slabs(whole(tensor.shape), tensor.dtype.itemsize, CHUNK):
        shape = box_shape(box)
        nbytes = int(np.prod(shape)) * tensor.dtype.itemsize
        tensor.read(box, buffer[:nbytes].view(tensor.dtype).reshape(shape))
        yield buffer[:nbytes]


def _write(descriptor: int, data: np.ndarray) -> None:
    left = data.data
    while left:
        left = left[os.write(descriptor, left) :]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_beside(source: Path, target: Path) -> None:
    for pattern in BESIDE:
        for file in source.glob(pattern):
            if file.is_file():
                # A kept file is a hard link to the old one: replace the name, not the contents.
                (target / file.name).unlink(missing_ok=True)
                shutil.copyfile(file, target / file.name)

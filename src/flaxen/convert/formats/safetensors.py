"""Safetensors files: checked in full when opened, then read into memory or seen through a map.

Format: https://github.com/huggingface/safetensors (8 bytes header length, JSON header, data).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flaxen.convert.formats.checkpoint import NO_JSON, Checkpoint
from flaxen.convert.formats.folder import open_folder
from flaxen.convert.formats.source import Entry, FileMap, FileTensor, possible
from flaxen.convert.lazy import LazyTensor
from flaxen.core.errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
        "C64": np.complex64,
    }.items()
}
PACKED = {"F4", "F6_E2M3", "F6_E3M2"}
"""Kinds that put elements at fractions of a byte."""

MAX_HEADER = 100_000_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def open_safetensors(path: Path) -> Checkpoint:
    """Open a `.safetensors` file, or a folder with one or with an index and its shards.

    Raises:
        CheckpointError: a file is absent, damaged, or at odds with the index.
    """
    return open_folder(path, "safetensors", SINGLE, INDEX, _tensors)


def _tensors(source: FileMap) -> tuple[dict[str, LazyTensor], dict[str, Any]]:
    entries, metadata = read_header(source.path)
    return {name: FileTensor(source, entry) for name, entry in entries.items()}, metadata


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Every entry of a file and its metadata, once the whole header has proved consistent."""
    with path.open("rb") as file:
        return parse_header(path, path.stat().st_size, file.read)


def parse_header(
    path: str | Path, size: int, read: Callable[[int], bytes]
) -> tuple[dict[str, Entry], dict[str, str]]:
    """`read_header` of anything that has a size and gives its next bytes."""
    length = int.from_bytes(read(8), "little")
    if size < 8 or length > min(MAX_HEADER, size - 8):
        raise _damaged(path, f"its header should have {length} bytes, the file has {size}")
    raw = read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=lambda p: _unique(path, p))
    except CheckpointError:
        raise
    except NO_JSON as error:
        raise _damaged(path, f"its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise _damaged(path, f"its __metadata__ is {metadata!r}, no JSON object")
    entries, spans = {}, []
    for name, fields in header.items():
        entry, stop = _entry(path, name, fields)
        entries[name] = entry._replace(start=entry.start + 8 + length)
        spans.append((entry.start, stop, name))
    _check_spans(path, sorted(spans), size - 8 - length)
    return entries, metadata


def _entry(path: str | Path, name: str, fields: Any) -> tuple[Entry, int]:
    try:
        kind, shape, (start, stop) = fields["dtype"], fields["shape"], fields["data_offsets"]
        numbers = (*shape, start, stop)
        counts = all(type(n) is int and n >= 0 for n in numbers)
        if type(kind) is not str or not counts or not possible(shape):
            raise ValueError
    except (TypeError, KeyError, ValueError) as error:
        raise _damaged(path, f"the header of {name!r} is malformed: {fields}") from error
    if kind in PACKED:
        raise CheckpointError(
            f"{name!r} in {path} is of kind {kind}, which packs several values into a byte; "
            "this is not supported. Use a checkpoint in another precision."
        )
    if kind not in DTYPES:
        raise _damaged(path, f"{name!r} is of the unknown dtype {kind!r}")
    dtype = DTYPES[kind]
    nbytes = math.prod(shape) * dtype.itemsize
    if stop - start != nbytes:
        raise _damaged(path, f"{name!r}, {kind}{shape}, needs {nbytes} bytes, has {stop - start}")
    return Entry(dtype, tuple(shape), start), stop


def _check_spans(path: str | Path, spans: list[tuple[int, int, str]], available: int) -> None:
    at = 0
    for start, stop, name in spans:
        if start != at:
            kind = "overlaps its neighbour" if start < at else "leaves a hole before it"
            raise _damaged(path, f"{name!r} {kind} (offset {start}, expected {at})")
        at = stop
    if at != available:
        raise _damaged(path, f"its header speaks of {at} bytes of data, it has {available}")


def _unique(path: str | Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _damaged(path, f"{twice!r} stands twice in its header")
    return found


def _damaged(path: str | Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or incomplete: {why}. Fetch or write it again.")

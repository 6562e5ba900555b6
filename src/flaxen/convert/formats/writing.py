"""Safetensors files, written in place: the header first, then values in any order."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flaxen.convert.formats.safetensors import DTYPES
from flaxen.convert.formats.subbyte import kind_and_shape
from flaxen.convert.lazy import ALIGNMENT, LazyTensor, aligned_empty, box_shape, whole
from flaxen.convert.views import slabs

CHUNK = 16 << 20
"""Bytes held in memory while writing."""

KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
"""How the format calls a dtype."""


def write_file(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    metadata: Mapping[str, str],
    progress: Callable[[int], None] | None = None,
) -> None:
    """One safetensors file, whose data start at a multiple of 64 bytes."""
    layout = Layout.of(tensors, metadata)
    layout.begin(path)
    layout.fill(path, tensors, None, progress)


class Layout(NamedTuple):
    """What stands where in a safetensors file: known before any value is.

    Tensors whose size is a multiple of 64 come first, so that each starts at one too and can be
    used where it is mapped; the others follow by falling alignment.
    """

    header: bytes
    starts: dict[str, int]
    size: int

    @classmethod
    def of(cls, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> Layout:
        ordered = sorted(tensors.items(), key=lambda item: -_alignment(item[1].nbytes))
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        starts, at = {}, 0
        for name, tensor in ordered:
            starts[name], at = at, at + tensor.nbytes
            kind, shape = kind_and_shape(tensor, KINDS)
            span = [starts[name], at]
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": span}
        raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        raw += b" " * (-(len(raw) + 8) % ALIGNMENT)
        raw = len(raw).to_bytes(8, "little") + raw
        return cls(raw, {n: len(raw) + s for n, s in starts.items()}, len(raw) + at)

    def begin(self, path: Path) -> None:
        """A file of the full size, with nothing but the header in it."""
        with path.open("wb", buffering=0) as file:
            _write(file.fileno(), np.frombuffer(self.header, np.uint8), 0)
            file.truncate(self.size)

    def fill(
        self,
        path: Path,
        tensors: Mapping[str, LazyTensor],
        held: Mapping[str, LazyTensor] | None,
        progress: Callable[[int], None] | None,
    ) -> int:
        """Write the values, or those of them that are `held`; gives the number of bytes."""
        written, largest = 0, max((tensors[name].nbytes for name in self.starts), default=0)
        buffer = aligned_empty((min(CHUNK, largest),), np.dtype(np.uint8))
        with path.open("r+b", buffering=0) as file:
            for name, start in self.starts.items():
                for at, data in _chunks(tensors[name], held[name] if held else None, buffer):
                    _write(file.fileno(), data, start + at)
                    written += data.nbytes
                    if progress is not None:
                        progress(data.nbytes)
            os.fsync(file.fileno())
        return written


def _alignment(nbytes: int) -> int:
    """The largest power of two up to 64 that divides a size."""
    return min(nbytes & -nbytes, ALIGNMENT) if nbytes else ALIGNMENT


def _chunks(
    tensor: LazyTensor, held: LazyTensor | None, buffer: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """Where bytes of a tensor stand in it, and those bytes, in a buffer used again and again."""
    size, at = tensor.dtype.itemsize, 0
    for box, _ in slabs(whole(tensor.shape), size, CHUNK):
        shape = box_shape(box)
        data = buffer[: math.prod(shape) * size]
        runs = [(0, math.prod(shape))] if held is None else _true_runs(held.read(box))
        if runs:
            tensor.read(box, data.view(tensor.dtype).reshape(shape))
        for start, stop in runs:
            yield at + start * size, data[start * size : stop * size]
        at += data.nbytes


def _true_runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """(start, stop) of each stretch of true values, in flat positions."""
    flat = np.concatenate([[False], mask.reshape(-1), [False]])
    ends = np.flatnonzero(flat[1:] != flat[:-1])
    return list(zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True))


def _write(descriptor: int, data: np.ndarray, at: int) -> None:
    left = data.data
    while left:
        count = os.pwrite(descriptor, left, at)
        left, at = left[count:], at + count

"""The tensor files of a checkpoint: boxes of arrays, by name."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from flaxen.convert.formats.safetensors import open_safetensors
from flaxen.convert.lazy import LazyTensor, box_shape, concrete, shifted
from flaxen.core.errors import CheckpointError


@dataclasses.dataclass
class Boxes:
    """An array in pieces, which are read when they are asked for."""

    pieces: list[tuple[tuple[slice, ...], LazyTensor]]

    @property
    def shape(self) -> tuple[int, ...]:
        boxes = [box for box, _ in self.pieces]
        return tuple(max(box[i].stop for box in boxes) for i in range(len(boxes[0])))

    @property
    def dtype(self) -> np.dtype:
        return self.pieces[0][1].dtype

    def read(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """One box, put together from the pieces that touch it."""
        wanted = concrete(index or (), self.shape)
        out, filled = np.empty(box_shape(wanted), self.dtype), 0
        for box, tensor in self.pieces:
            common = [
                slice(max(w.start, b.start), min(w.stop, b.stop))
                for w, b in zip(wanted, box, strict=True)
            ]
            if all(s.start < s.stop for s in common):
                target = tuple(shifted(s, -w.start) for s, w in zip(common, wanted, strict=True))
                source = [shifted(s, -b.start) for s, b in zip(common, box, strict=True)]
                out[target] = tensor.read(source)
                filled += math.prod(box_shape(target))
        if filled != out.size:
            raise CheckpointError(f"Only {filled} of {out.size} numbers are in the checkpoint.")
        return out


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one file, and wait until it is on the disk."""
    from safetensors.numpy import save_file

    save_file({key: np.asarray(x, order="C") for key, x in tensors.items()}, path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_boxes(files: Iterable[Path]) -> dict[str, Boxes]:
    """Every array in these files, by path.

    Raises:
        CheckpointError: a file is absent or damaged.
    """
    arrays: dict[str, Boxes] = {}
    for path in files:
        for key, tensor in open_safetensors(path).items():
            name, _, text = key.partition("|")
            bounds = [pair.split(":") for pair in text.split(",") if pair]
            box = tuple(slice(int(start), int(stop)) for start, stop in bounds)
            arrays.setdefault(name, Boxes([])).pieces.append((box, tensor))
    return arrays

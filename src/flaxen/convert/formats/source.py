"""Files that tensors are read from: into memory, or seen through a map."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flaxen.convert.lazy import Box, ByteCounter, LazyTensor, Mapped, copy
from flaxen.convert.reshaping import single_run
from flaxen.core.errors import CheckpointError


class Entry(NamedTuple):
    """Where one tensor stands in a file; `start` counts from the beginning of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int


MAX_AXES = 64
MAX_SIZE = 1 << 48


def possible(shape: tuple[int, ...]) -> bool:
    """Whether an array can have this shape, which a file may claim for a tensor without values."""
    return len(shape) <= MAX_AXES and math.prod(n or 1 for n in shape) <= MAX_SIZE


class FileMap:
    """An open file and a read-only map of it; arrays over the map outlive `close`.

    Raises:
        CheckpointError: the file is empty.
    """

    def __init__(self, path: Path, counter: ByteCounter):
        self.path, self.counter = path, counter
        self.descriptor = os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        if not os.fstat(self.descriptor).st_size:
            self.close()
            raise CheckpointError(f"{path} is empty. Fetch or write it again.")
        mapping = mmap.mmap(self.descriptor, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
        self.memory = np.frombuffer(mapping, np.uint8)

    def read_into(self, start: int, out: np.ndarray) -> None:
        """Fill a contiguous array with the bytes from `start` on."""
        if not self.close.alive:
            raise CheckpointError(f"{self.path} was closed; open the checkpoint again to read it.")
        left = out.reshape(-1).view(np.uint8).data
        while left:
            count = os.preadv(self.descriptor, [left], start)
            if count == 0:
                raise CheckpointError(f"{self.path} became shorter while it was read.")
            left, start = left[count:], start + count


class FileTensor(LazyTensor):
    """A tensor in a mapped file."""

    def __init__(self, source: FileMap, entry: Entry):
        self.source, self.start = source, entry.start
        self.dtype, self.shape = entry.dtype, entry.shape

    def fill(self, box: Box, out: np.ndarray) -> None:
        self.source.counter.add(out.nbytes)
        run = single_run(box, self.shape) if out.flags.c_contiguous else None
        if run is not None:
            self.source.read_into(self.start + run[0] * self.dtype.itemsize, out)
        else:
            copy(out, self._array()[(*box, ...)])

    def mapped(self, box: Box) -> Mapped | None:
        return Mapped(self._array()[(*box, ...)], self.source.counter)

    def _array(self) -> np.ndarray:
        memory = self.source.memory[self.start : self.start + self.nbytes]
        return memory.view(self.dtype).reshape(self.shape)

"""Files that tensors are read from: into memory, or seen through a map."""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from flaxen.convert.lazy import Box, ByteCounter, LazyTensor, Mapped, copy
from flaxen.convert.reshaping import single_run
from flaxen.core.errors import CheckpointError

WINDOW = 32 << 20
"""Bytes used through maps after which their pages are let go."""

MAX_AXES = 64
MAX_SIZE = 1 << 48


class Entry(NamedTuple):
    """Where one tensor stands in a file; `start` counts from the beginning of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int


class Window(ByteCounter):
    """Counts what was used through one map, and lets go of the pages after a while.

    They stay in the page cache; but those that are mapped count as memory of this process.
    """

    _maps: ClassVar[weakref.WeakSet[mmap.mmap]] = weakref.WeakSet()
    _used: ClassVar[int] = 0
    _all: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, mapping: mmap.mmap, counter: ByteCounter):
        self.mapping, self.counter = mapping, counter

    def add(self, nbytes: int) -> None:
        self.counter.add(nbytes)
        with Window._all:
            Window._maps.add(self.mapping)
            Window._used += nbytes
            if Window._used >= WINDOW:
                for mapping in Window._maps:
                    mapping.madvise(mmap.MADV_DONTNEED)
                Window._maps.clear()
                Window._used = 0


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
        self.window = Window(mapping, counter)

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
        run = single_run(box, self.shape) if out.flags.c_contiguous else None
        if run is not None:
            self.source.counter.add(out.nbytes)
            self.source.read_into(self.start + run[0] * self.dtype.itemsize, out)
        else:
            copy(out, self._array()[(*box, ...)])
            self.source.window.add(out.nbytes)

    def mapped(self, box: Box) -> Mapped | None:
        return Mapped(self._array()[(*box, ...)], self.source.window)

    def _array(self) -> np.ndarray:
        memory = self.source.memory[self.start : self.start + self.nbytes]
        return memory.view(self.dtype).reshape(self.shape)

"""A lazy tensor that knows what was read of it."""

from __future__ import annotations

import numpy as np

from flaxen.convert.lazy import Box, ByteCounter, LazyTensor, Mapped


class Source(LazyTensor):
    """An array that counts what is read of it, with or without showing its memory."""

    def __init__(self, array: np.ndarray, shows_memory: bool = False):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        array.flags.writeable = False
        self.counter, self.shows_memory = ByteCounter(), shows_memory
        self.reads = 0

    def fill(self, box: Box, out: np.ndarray) -> None:
        self.reads += 1
        self.counter.add(out.nbytes)
        out[...] = self.array[box]

    def mapped(self, box: Box) -> Mapped | None:
        return Mapped(self.array[box], self.counter) if self.shows_memory else None

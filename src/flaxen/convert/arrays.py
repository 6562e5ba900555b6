"""Arrays that exist, as lazy tensors."""

from __future__ import annotations

import jax
import numpy as np

from flaxen.convert.lazy import Box, ByteCounter, LazyTensor, Mapped, box_shape, concrete, copy
from flaxen.core.errors import CheckpointError


class ArrayTensor(LazyTensor):
    """A NumPy array, or a jax array each shard of which is read where it lies, never gathered."""

    def __init__(self, array: np.ndarray | jax.Array):
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        self.counter = ByteCounter()
        if isinstance(array, jax.Array):
            shards = {str(s.index): s for s in array.addressable_shards}
            self.shards = [(concrete(s.index, self.shape), s.data) for s in shards.values()]
        else:
            self.shards = [(concrete((slice(None),) * array.ndim, self.shape), array)]

    def fill(self, box: Box, out: np.ndarray) -> None:
        self.counter.add(out.nbytes)
        filled = 0
        for where, data in self.shards:
            shared = [_overlap(b, w) for b, w in zip(box, where, strict=True)]
            if all(s.start < s.stop for s in shared):
                place = (_from(s, b.start) for s, b in zip(shared, box, strict=True))
                target = out[(*place, ...)]
                inner = tuple(_from(s, w.start) for s, w in zip(shared, where, strict=True))
                copy(target, _host(data, inner))
                filled += target.size
        if filled < out.size:
            raise CheckpointError(
                "Part of an array lives on another process: gather it first, "
                "or save from the process that holds it."
            )

    def mapped(self, box: Box) -> Mapped | None:
        if len(self.shards) != 1 or not _on_host(self.shards[0][1]):
            return None
        where, data = self.shards[0]
        inner = tuple(_from(b, w.start) for b, w in zip(box, where, strict=True))
        return Mapped(np.asarray(data)[(*inner, ...)], self.counter)


def _on_host(data: np.ndarray | jax.Array) -> bool:
    return isinstance(data, np.ndarray) or next(iter(data.devices())).platform == "cpu"


def _host(data: np.ndarray | jax.Array, inner: Box) -> np.ndarray:
    # On an accelerator, cut first: only the box travels, and jax keeps no host copy of the shard.
    if _on_host(data):
        return np.asarray(data)[inner]
    return np.asarray(data if box_shape(inner) == data.shape else data[inner])


def _overlap(a: slice, b: slice) -> slice:
    return slice(max(a.start, b.start), min(a.stop, b.stop))


def _from(part: slice, start: int) -> slice:
    return slice(part.start - start, part.stop - start)

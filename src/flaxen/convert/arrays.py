"""Arrays that exist, as lazy tensors."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from flaxen.convert.lazy import (
    Box,
    ByteCounter,
    LazyTensor,
    Mapped,
    box_shape,
    concrete,
    copy,
    shifted,
    whole,
)
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
        if self._fill_own(box, out) < out.size:
            raise CheckpointError(
                "Part of an array lives on another process: let all processes save together, or "
                "gather it first."
            )

    def _fill_own(self, box: Box, out: np.ndarray) -> int:
        """Write what this process has of a box; how many elements that is."""
        self.counter.add(out.nbytes)
        filled = 0
        for where, data in self.shards:
            shared = _shared(box, where)
            if shared is not None:
                target = out[(*_within(shared, box), ...)]
                copy(target, _host(data, _within(shared, where)))
                filled += target.size
        return filled

    def mapped(self, box: Box) -> Mapped | None:
        where, data = self.shards[0] if len(self.shards) == 1 else (None, None)
        if where != whole(self.shape) or not _on_host(data):
            return None
        return Mapped(np.asarray(data)[(*box, ...)], self.counter)


class OwnPart(ArrayTensor):
    """What this process has of an array; the rest of what is asked for is left as it was."""

    def fill(self, box: Box, out: np.ndarray) -> None:
        self._fill_own(box, out)


class Held(LazyTensor):
    """Which elements of an array this process is to write: each is written by one process."""

    dtype = np.dtype(np.bool_)

    def __init__(self, array: np.ndarray | jax.Array):
        self.shape = tuple(array.shape)
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            first = [s for s in array.addressable_shards if s.replica_id == 0]
            self.boxes = [concrete(s.index, self.shape) for s in first]
        else:
            self.boxes = [whole(self.shape)] if jax.process_index() == 0 else []

    def fill(self, box: Box, out: np.ndarray) -> None:
        out[...] = False
        for where in self.boxes:
            shared = _shared(box, where)
            if shared is not None:
                out[_within(shared, box)] = True


def _on_host(data: Any) -> bool:
    return isinstance(data, np.ndarray) or next(iter(data.devices())).platform == "cpu"


def _host(data: np.ndarray | jax.Array, inner: Box) -> np.ndarray:
    # On an accelerator, cut first: only the box travels, and jax keeps no host copy of the shard.
    if _on_host(data):
        return np.asarray(data)[inner]
    return np.asarray(data if box_shape(inner) == data.shape else data[inner])


def _shared(a: Box, b: Box) -> Box | None:
    """What two boxes have in common."""
    both = zip(a, b, strict=True)
    common = tuple(slice(max(s.start, t.start), min(s.stop, t.stop)) for s, t in both)
    return common if all(s.start < s.stop for s in common) else None


def _within(box: Box, outer: Box) -> Box:
    """The same box, counted from the start of one around it."""
    return tuple(shifted(s, -o.start) for s, o in zip(box, outer, strict=True))
